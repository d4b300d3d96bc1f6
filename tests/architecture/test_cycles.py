"""No module imports itself in a circle."""

import graphlib

import grimp

PACKAGES = ("coordinator", "sidecar", "worker_shim", "scout")


def test_no_import_goes_in_a_circle() -> None:
    """Two modules in a circle are one module that cannot be read, tested or moved in parts."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    order = graphlib.TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    )
    assert len(list(order.static_order())) == len(graph.modules)
