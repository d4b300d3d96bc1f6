"""What every dashboard shares: data source, queries, panel frames, colours, variables.

The builders come from the grafana-foundation-sdk, whose classes carry no usable types; they are
`Any` here, and the tests read the finished JSON instead.
"""

from collections.abc import Mapping
from typing import Any, Final

from grafana_foundation_sdk.builders import bargauge, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models import common, prometheus
from grafana_foundation_sdk.models import dashboard as model

Builder = Any

TAG: Final = "outrider"
SCRAPE_INTERVAL: Final = "15s"
"""Shortest useful step of a query; Prometheus has nothing between two scrapes."""

SOURCE: Final = model.DataSourceRef(type_val="prometheus", uid="${datasource}")

JOB: Final = 'training_job=~"$training_job"'
NODE: Final = 'node=~"$node"'

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
            .interval(SCRAPE_INTERVAL)
            .span(width)
            .height(height)
        )

    def _number(self) -> int:
        number = self._next_id
        self._next_id += 1
        return number


def table_columns(hide: tuple[str, ...], rename: Mapping[str, str]) -> Builder:
    """Return the transformation that drops and renames a table's columns."""
    return model.DataTransformerConfig(
        id_val="organize",
        options={"excludeByName": dict.fromkeys(hide, True), "renameByName": dict(rename)},
    )


def column(key: str, value: object) -> Builder:
    """Return one property for an override of a column."""
    return model.DynamicConfigValue(id_val=key, value=value)


def label_variable(name: str, label: str, query: str, *, many: bool) -> Builder:
    """Return a variable that lists a label's values; ``many`` allows several and all."""
    variable = (
        board.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )
    return variable.multi(True).include_all(True).all_value(".+") if many else variable


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
    )


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
