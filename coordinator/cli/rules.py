"""``outrider rules``: the shipped log rules, and a person's own before a job has them.

Nothing here talks to a coordinator.  The rules' engine is the sidecar's and is imported when a
sub-command needs it, so that ``--help`` stays quick.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from coordinator.cli.arguments import add_json, given_name, given_path
from coordinator.cli.console import cell, console, print_json, table
from coordinator.cli.errors import UserError
from coordinator.cli.rules_file import AUTO, read_document, rules_of, spec_problem
from coordinator.wording import one_line

PROBLEMS: Final = 1
"""Exit status of ``outrider rules check`` when a rule cannot be used."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of ``outrider rules``."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = _action(commands, "list", "show the shipped rules and what they mean")
    listing.add_argument("--markdown", action="store_true", help="print the table of the docs")
    add_json(listing)
    check = _action(commands, "check", "say everything that is wrong with rules")
    check.add_argument(
        "rules", type=given_path, metavar="RULES", help="a list of rules, or a job spec"
    )
    add_json(check)
    test = _action(commands, "test", "replay a log and show what the rules make of it")
    test.add_argument(
        "--library", action="store_true", help="use every shipped rule instead of RULES"
    )
    test.add_argument(
        "inputs",
        nargs="+",
        type=given_name,
        metavar="RULES LOG",
        help=f"rules (a file, or {AUTO} for the shipped ones that fit the log) and the log, - "
        "for standard input",
    )
    add_json(test)
    suggest = _action(commands, "suggest", "say which rules fit a log, with values from it")
    suggest.add_argument(
        "log", type=given_name, metavar="LOG", help="a job's output, - for standard input"
    )
    add_json(suggest)


def _action(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    description = f"{summary[0].upper()}{summary[1:]}."
    made: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=description)
    return made


def run(args: argparse.Namespace) -> int:
    """Do what was asked for."""
    return _ACTIONS[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from sidecar.logs.library.catalogue import topics  # noqa: PLC0415 - see the module's head

    if args.markdown:
        from coordinator.cli.rules_table import markdown  # noqa: PLC0415 - as above

        sys.stdout.write(markdown())
        return 0
    rows = [(topic, entry) for topic in topics() for entry in topic.entries]
    if args.json:
        print_json(
            [
                {
                    "name": entry.name,
                    "topic": topic.title,
                    "kind": "steps" if topic.steps else "faults",
                    "role": entry.role,
                    "class": entry.fault_class,
                    "means": entry.means,
                    "rule": dict(entry.written),
                    "examples": [
                        {"line": one.line, "fields": dict(one.fields)} for one in entry.examples
                    ],
                    "not_matched": list(entry.others),
                }
                for topic, entry in rows
            ]
        )
        return 0
    shown = table("", ("rule", "topic", "role", "class", "means"))
    for topic, entry in rows:
        style = "red" if entry.rule.fault_on_match else ""
        shown.add_row(
            cell(entry.name),
            cell(topic.title),
            cell(entry.role, style),
            cell(entry.fault_class),
            cell(entry.means),
        )
    out = console()
    out.print(shown)
    out.print(cell("rules of faults watch every job; step lines are chosen by its output", "dim"))
    return 0


def _check(args: argparse.Namespace) -> int:
    from sidecar.logs.rule_files import problems, usable  # noqa: PLC0415 - as above

    document = read_document(args.rules)
    given = rules_of(document, args.rules)
    if (wrong := spec_problem(document, args.rules)) is not None:
        raise UserError(wrong)
    found = problems(given)
    slow = [rule.name for rule in usable(given) if not rule.pattern.literals]
    if args.json:
        lines = [{"rule": one.rule, "field": one.field, "reason": one.reason} for one in found]
        print_json({"rules": len(given), "problems": lines, "without_literal": slow})
        return PROBLEMS if found else 0
    for one in found:
        sys.stdout.write(_line(f"{args.rules}: rule {one.rule}: {one.field}: {one.reason}"))
    for name in slow:
        reason = "no text of 3 letters or more stands in every match, so every line is searched"
        sys.stdout.write(_line(f"{args.rules}: note: rule {name}: logPattern: {reason}"))
    if not found:
        sys.stdout.write(_line(f"{args.rules}: {len(given)} rules, all of them can be used"))
    return PROBLEMS if found else 0


def _test(args: argparse.Namespace) -> int:
    from coordinator.cli.rules_replay import replay  # noqa: PLC0415 - as above

    wanted = 1 if args.library else 2
    if len(args.inputs) != wanted:
        raise UserError(
            "`outrider rules test` takes RULES and LOG, like `outrider rules test auto job.log`, "
            "or --library and LOG"
        )
    source = None if args.library else args.inputs[0]
    return replay(source, args.inputs[-1], as_json=args.json)


def _suggest(args: argparse.Namespace) -> int:
    from coordinator.cli.rules_suggest import suggest  # noqa: PLC0415 - as above

    return suggest(args.log, as_json=args.json)


_ACTIONS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = MappingProxyType(
    {"list": _list, "check": _check, "test": _test, "suggest": _suggest}
)


def _line(text: str) -> str:
    return f"{one_line(text, 600)}\n"
