"""What every dashboard shares: data source, queries, panel frames, colours, variables.

The builders come from the grafana-foundation-sdk, whose classes carry no usable types; they are
`Any` here, and the tests read the finished JSON instead.
"""

from collections.abc import Mapping
from typing import Any, Final

from grafana_foundation_sdk.builders import (
    bargauge,
    heatmap,
    stat,
    statetimeline,
    table,
    text,
    timeseries,
)
from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models import common, prometheus
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.text import TextMode

Builder = Any

TAG: Final = "outrider"
SCRAPE_INTERVAL: Final = "15s"
"""Shortest useful step of a query; Prometheus has nothing between two scrapes."""

SOURCE: Final = model.DataSourceRef(type_val="prometheus", uid="${datasource}")

CLUSTER: Final = 'cluster=~"$cluster"'
JOB: Final = f'{CLUSTER}, training_job=~"$training_job"'
NODE: Final = f'{CLUSTER}, node=~"$node"'
NONE: Final = "none"
"""What a panel says when its query is rightly empty."""

SCHEME: Final = HeatmapColorMode.SCHEME

GOOD: Final = "green"
BUSY: Final = "blue"
WARN: Final = "orange"
BAD: Final = "red"
LOST: Final = "dark-red"
IDLE: Final = "text"


def over_time(expr: str, legend: str, *, ref: str = "A") -> Builder:
    """Return a query over the shown time range."""
    return Dataquery().expr(expr).legend_format(legend).ref_id(ref).datasource(SOURCE).range()


def right_now(expr: str, legend: str = "", *, as_table: bool = False) -> Builder:
    """Return a query at the end of the shown time range."""
    query = Dataquery().expr(expr).legend_format(legend).ref_id("A").datasource(SOURCE).instant()
    return query.format(prometheus.PromQueryFormat.TABLE) if as_table else query


def thresholds(base: str, *steps: tuple[float, str]) -> Builder:
    """Return colours by value: ``base`` below the first step."""
    all_steps = [model.Threshold(value=None, color=base)]
    all_steps += [model.Threshold(value=value, color=color) for value, color in steps]
    return board.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(all_steps)


def state_number(selector: str, label: str, states: Mapping[str, str], by: str) -> str:
    """Return an expression whose value is the position of the state that is set.

    A state set has one series per state; a state timeline wants one value per line.
    """
    metric, _, matchers = selector.removesuffix("}").partition("{")
    terms = [
        f'max by ({by}) ({metric}{{{matchers},{label}="{state}"}}) * {number}'
        for number, state in enumerate(states)
    ]
    return " + ".join(terms)


def state_names(states: Mapping[str, str]) -> Builder:
    """Return the mapping from `state_number` back to names and colours."""
    return model.ValueMap(
        options={
            str(number): model.ValueMappingResult(
                text=state.replace("_", " "), color=color, index=number
            )
            for number, (state, color) in enumerate(states.items())
        }
    )


def words_colored(colors: Mapping[str, str]) -> Builder:
    """Return the mapping that colours words."""
    return model.ValueMap(
        options={
            word: model.ValueMappingResult(text=word, color=color, index=number)
            for number, (word, color) in enumerate(colors.items())
        }
    )


def ascending(column_name: str) -> Builder:
    """Return a table's order by one column."""
    return common_builders.TableSortByFieldState().display_name(column_name).desc(False)


class Frames:
    """Makes panels with everything a panel must have; numbers them in the order of the page."""

    def __init__(self) -> None:
        self._next_id = 1

    def row(self, title: str) -> Builder:
        """Return a row header."""
        return board.Row(title).id(self._number())

    def number(self, title: str, why: str, unit: str, *, width: int, height: int = 4) -> Builder:
        """Return one big number on a coloured ground."""
        return (
            self._frame(stat.Panel(), title, why, unit=unit, width=width, height=height)
            .color_mode(common.BigValueColorMode.BACKGROUND)
            .graph_mode(common.BigValueGraphMode.NONE)
            .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        )

    def lines(self, title: str, why: str, unit: str, *, width: int, height: int = 8) -> Builder:
        """Return curves with a sorted legend table beside them."""
        return (
            self._frame(timeseries.Panel(), title, why, unit=unit, width=width, height=height)
            .show_points(common.VisibilityMode.NEVER)
            .fill_opacity(10)
            .tooltip(
                common_builders.VizTooltipOptions()
                .mode(common.TooltipDisplayMode.MULTI)
                .sort(common.SortOrder.DESCENDING)
            )
            .legend(
                common_builders.VizLegendOptions()
                .display_mode(common.LegendDisplayMode.TABLE)
                .placement(common.LegendPlacement.RIGHT)
                .show_legend(True)
                .calcs(["lastNotNull", "max"])
                .sort_by("Last *")
                .sort_desc(True)
            )
        )

    def columns(self, title: str, why: str, unit: str, *, width: int, height: int = 8) -> Builder:
        """Return stacked columns, for events that are counted."""
        stacked = common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A")
        return (
            self.lines(title, why, unit, width=width, height=height)
            .draw_style(common.GraphDrawStyle.BARS)
            .fill_opacity(80)
            .stacking(stacked)
        )

    def states(self, title: str, why: str, *, width: int, height: int = 8) -> Builder:
        """Return one coloured band per line; the caller maps the numbers to names."""
        return (
            self._frame(statetimeline.Panel(), title, why, unit="none", width=width, height=height)
            .show_value(common.VisibilityMode.AUTO)
            .merge_values(True)
            .row_height(0.85)
            .fill_opacity(80)
        )

    def bars(self, title: str, why: str, unit: str, *, width: int, height: int = 8) -> Builder:
        """Return horizontal bars to compare a handful of values."""
        return (
            self._frame(bargauge.Panel(), title, why, unit=unit, width=width, height=height)
            .orientation(common.VizOrientation.HORIZONTAL)
            .display_mode(common.BarGaugeDisplayMode.BASIC)
            .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        )

    def heat(self, title: str, why: str, *, width: int, height: int = 8) -> Builder:
        """Return how often which duration occurred, over time; the query returns buckets."""
        return (
            self._frame(heatmap.Panel(), title, why, unit="short", width=width, height=height)
            .calculate(False)
            .y_axis(heatmap.YAxisConfig().unit("s"))
            .color(heatmap.HeatmapColorOptions().scheme("Blues").steps(32).mode(SCHEME))
            .exemplars_color("rgba(255,120,10,0.9)")
        )

    def words(self, title: str, why: str, markdown: str, *, width: int, height: int) -> Builder:
        """Return a text that explains the panels around it."""
        return (
            text.Panel()
            .id(self._number())
            .title(title)
            .description(why)
            .mode(TextMode.MARKDOWN)
            .content(markdown)
            .span(width)
            .height(height)
        )

    def rows(self, title: str, why: str, unit: str, *, width: int, height: int = 8) -> Builder:
        """Return a table."""
        return self._frame(table.Panel(), title, why, unit=unit, width=width, height=height)

    def _frame(
        self, panel: Builder, title: str, why: str, *, unit: str, width: int, height: int
    ) -> Builder:
        return (
            panel.id(self._number())
            .title(title)
            .description(why)
            .unit(unit)
            .datasource(SOURCE)
            .no_value(NONE)
            .interval(SCRAPE_INTERVAL)
            .span(width)
            .height(height)
        )

    def _number(self) -> int:
        number = self._next_id
        self._next_id += 1
        return number


def increase(expr: str, by: str, window: str = "$__rate_interval") -> str:
    """Return how much a counter grew per window, summed by labels."""
    return f"sum by ({by}) (increase({expr}[{window}]))"


def buckets(metric: str, matchers: str) -> Builder:
    """Return a query for a heatmap of a histogram."""
    expr = f"sum by (le) (increase({metric}_bucket{{{matchers}}}[$__rate_interval]))"
    query = over_time(expr, "{{le}}").exemplar(True)
    return query.format(prometheus.PromQueryFormat.HEATMAP)


def quantile(share: float, metric: str, matchers: str, by: str = "", window: str = "") -> str:
    """Return a quantile of a histogram over ``window``, by labels if any."""
    labels = f"le, {by}" if by else "le"
    inner = f"sum by ({labels}) (increase({metric}_bucket{{{matchers}}}[{window or '$__range'}]))"
    return f"histogram_quantile({share}, {inner})"


def matrix(row: str, column: str) -> list[Builder]:
    """Return the transformations that lay series out as a table of rows and columns."""
    grouping = {"rowField": row, "columnField": column, "valueField": "Value"}
    renamed = {"excludeByName": {}, "renameByName": {f"{row}\\{column}": row}}
    return [
        model.DataTransformerConfig(id_val="groupingToMatrix", options=grouping),
        model.DataTransformerConfig(id_val="organize", options=renamed),
    ]


def table_columns(
    hide: tuple[str, ...], rename: Mapping[str, str], order: tuple[str, ...] = ()
) -> Builder:
    """Return the transformation that drops, renames and orders a table's columns."""
    options: dict[str, object] = {
        "excludeByName": dict.fromkeys(hide, True),
        "renameByName": dict(rename),
    }
    if order:
        options["indexByName"] = {name: place for place, name in enumerate(order)}
    return model.DataTransformerConfig(id_val="organize", options=options)


def column(key: str, value: object) -> Builder:
    """Return one property for an override of a column."""
    return model.DynamicConfigValue(id_val=key, value=value)


def label_variable(
    name: str, label: str, query: str, *, many: bool, all_value: str = ".+"
) -> Builder:
    """Return a variable that lists a label's values; ``many`` allows several and all."""
    variable = (
        board.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )
    return variable.multi(True).include_all(True).all_value(all_value) if many else variable


def new_dashboard(uid: str, title: str, description: str) -> Builder:
    """Return an empty dashboard whose first variable is the data source."""
    siblings = (
        board.DashboardLink("Outrider")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )
    return (
        board.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .readonly()
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(siblings)
        .with_variable(
            board.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .with_variable(
            label_variable(
                "cluster",
                "Cluster",
                "label_values(outrider_job_info, cluster)",
                many=True,
                all_value=".*",  # a label that nobody set is matched as well
            )
        )
        .with_variable(
            label_variable(
                "training_job",
                "Job",
                f"label_values(outrider_job_info{{{CLUSTER}}}, training_job)",
                many=False,
            )
        )
        .annotation(
            mark(
                "Restarts",
                f"sum by (mode) (increase(outrider_restarts_total{{{JOB}}}[$__rate_interval])) > 0",
                WARN,
            )
        )
        .annotation(
            mark(
                "Faults",
                f"sum by (kind) (increase(outrider_faults_total{{{JOB}}}[$__rate_interval])) > 0",
                BAD,
            )
        )
    )


def node_variable(*, many: bool = True) -> Builder:
    """Return the variable that lists the nodes of the chosen job."""
    return label_variable(
        "node",
        "Node",
        f"label_values(outrider_coordinator_agent_last_seen_timestamp_seconds{{{JOB}}}, node)",
        many=many,
    )


def coordinator_variable() -> Builder:
    """Return where the coordinator is, as a browser reaches it: its pages are linked to."""
    return (
        board.TextBoxVariable("coordinator")
        .label("Coordinator")
        .default_value("http://127.0.0.1:8081")
    )


def page_link(title: str, url: str) -> Builder:
    """Return a link at the top of a dashboard to a page outside Grafana."""
    return board.DashboardLink(title).type(model.DashboardLinkType.LINK).url(url).target_blank(True)


def link_to(uid: str, title: str, *variables: str) -> dict[str, str]:
    """Return a column's link that opens a dashboard with the clicked value and what is chosen."""
    chosen = "&".join(f"${{{name}:queryparam}}" for name in ("cluster", "training_job"))
    own = "&".join(variables)
    return {"title": title, "url": f"/d/{uid}?{own}&{chosen}&${{__url_time_range}}"}


def clicked(variable: str, field: str = "") -> str:
    """Return the part of a link that hands on the clicked value, or the ``field`` of its row.

    Encoded, because a node or an incident may be called anything: an ``&`` in its name would end
    the value, a ``#`` the address.
    """
    value = f"__data.fields.{field}" if field else "__value.text"
    return f"var-{variable}=${{{value}:percentencode}}"


def mark(name: str, expr: str, color: str) -> Builder:
    """Return an annotation drawn wherever ``expr`` has a value."""
    return (
        board.AnnotationQuery()
        .name(name)
        .datasource(SOURCE)
        .enable(True)
        .icon_color(color)
        .expr(expr)
    )
