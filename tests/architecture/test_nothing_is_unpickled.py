"""Bytes from elsewhere become data, never code."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("coordinator", "sidecar", "worker_shim", "scout")
MODULES = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal",
    "multiprocessing.connection", "multiprocessing.managers",
}  # fmt: skip
BUILT_IN = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "os.system", "os.popen",
    "subprocess.getoutput", "subprocess.getstatusoutput",
}  # fmt: skip
SAFE_LOADERS = {"yaml.CSafeLoader", "yaml.SafeLoader", "_Loader", "_LOADER"}
"""The library's own, and ours, which are made of them."""
SCRIPTS = {("sidecar/workers/zygote.py", "exec"), ("sidecar/workers/zygote.py", "compile")}
"""Where the user's own training script is run, as Python would run it."""
OBJECT_COLLECTIVES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
"""torch.distributed pickles what these carry."""


def dotted(node: ast.expr) -> str:
    """Return ``a.b`` of a name or an attribute."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def problems(tree: ast.AST) -> list[str]:
    """Return what in ``tree`` makes code of bytes."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [item.name for item in node.names if item.name in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found.append(node.module)
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            given = {item.arg: item.value for item in node.keywords}
            if name in BUILT_IN | CALLS or name.rpartition(".")[2] in OBJECT_COLLECTIVES:
                found.append(name)
            loader = (
                dotted(given["Loader"] if "Loader" in given else node.args[-1])
                if (name == "yaml.load")
                else "yaml.SafeLoader"
            )
            if loader not in SAFE_LOADERS:
                found.append(f"yaml.load with {loader}")
            safe = given.get("weights_only")
            if name == "torch.load" and not (isinstance(safe, ast.Constant) and safe.value is True):
                found.append("torch.load without weights_only=True")
            shell = given.get("shell")
            if shell is not None and not (isinstance(shell, ast.Constant) and not shell.value):
                found.append(f"{name} with a shell")
    return found


def test_no_product_module_makes_code_of_bytes() -> None:
    """One message from a taken node would run a command on the coordinator."""
    wrong = [
        f"{path.relative_to(ROOT)}: {problem}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for problem in problems(ast.parse(path.read_text(encoding="utf-8")))
        if (str(path.relative_to(ROOT)), problem) not in SCRIPTS
    ]
    assert not wrong, "\n".join(wrong)


def test_the_check_finds_what_it_is_for() -> None:
    """A check that finds nothing passes for ever."""
    for source in (
        "import pickle",
        "from multiprocessing.connection import Client",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "eval(text)",
        "yaml.load(text)",
        "subprocess.run(text, shell=True)",
        "dist.all_gather_object(out, mine)",
    ):
        assert problems(ast.parse(source)), source
    assert not problems(ast.parse("torch.load(path, weights_only=True)\nre.compile(text)"))
