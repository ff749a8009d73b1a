"""The Python kernel: ipykernel, with formatters for data frames and for the charts in matplotlib figures."""

import json
import sys
from typing import Any

from ipykernel.kernelapp import IPKernelApp
from IPython.core.formatters import BaseFormatter
from traitlets import ObjectName, Unicode

CHART = "application/vnd.atoll.chart+json"
DATA = "application/vnd.atoll.data+json"
MOST_CELLS = 100_000  # a larger data frame is shown, and not sent as data


class JsonFormatter(BaseFormatter):
    """Makes an object that JSON can carry."""

    print_method = ObjectName("_repr_atoll_")
    _return_type = dict


class ChartFormatter(JsonFormatter):
    format_type = Unicode(CHART)

    def pop(self, typ: Any, default: Any = None) -> Any:
        """Keep the printer of figures: matplotlib takes it from all formatters when its own formats are chosen."""
        return default


class DataFormatter(JsonFormatter):
    format_type = Unicode(DATA)


def chart_of(figure: Any) -> dict[str, Any] | None:
    """Return what is drawn in a matplotlib figure, as numbers and words; None for an empty one."""
    from e2b_charts import chart_figure_to_dict

    found = json.loads(json.dumps(chart_figure_to_dict(figure), default=_plain))
    return found or None


def data_of(frame: Any) -> dict[str, Any] | None:
    """Return a data frame's columns as lists; None for a very large one."""
    if frame.size > MOST_CELLS:
        return None
    columns = frame.to_dict(orient="list")
    return {str(name): [_cell(value) for value in values] for name, values in columns.items()}


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, (int, float)):
        return value if value == value and value not in (float("inf"), float("-inf")) else None
    return _plain(value)


def _plain(value: Any) -> Any:
    """Return what stands for a value that JSON does not have."""
    if hasattr(value, "isoformat"):
        return value.isoformat() if value == value else None  # not a time
    if hasattr(value, "item"):
        return _cell(value.item())
    return str(value)


def _quietly(make: Any) -> Any:
    """A figure or frame that cannot be described is shown without the description."""

    def made(value: Any) -> Any:
        try:
            return make(value)
        except Exception as error:
            print(f"no description of this {type(value).__name__}: {error!r:.200}", file=sys.__stderr__)
            return None

    return made


def register(shell: Any) -> None:
    """Teach the shell to describe figures and data frames. Neither package is imported before the code does."""
    formatters = shell.display_formatter.formatters
    chart, data = ChartFormatter(parent=shell.display_formatter), DataFormatter(parent=shell.display_formatter)
    chart.for_type_by_name("matplotlib.figure", "Figure", _quietly(chart_of))
    for module in ("pandas", "pandas.core.frame", "pandas.api.typing"):
        data.for_type_by_name(module, "DataFrame", _quietly(data_of))
    formatters[CHART], formatters[DATA] = chart, data
    shell.display_formatter.active_types = [*shell.display_formatter.active_types, CHART, DATA]
    # Formats besides PNG: what a figure is asked for by `set_matplotlib_formats` stays the code's choice.


def main() -> None:
    app = IPKernelApp.instance()
    app.initialize([*sys.argv[1:], "--HistoryManager.enabled=False", "--InteractiveShell.colors=nocolor"])
    register(app.shell)
    app.start()


if __name__ == "__main__":
    main()
