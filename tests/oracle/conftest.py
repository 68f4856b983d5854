"""The oracle's own option, and what it says at the end."""


def pytest_addoption(parser):
    parser.addoption(
        "--write-parity", action="store_true", help="write docs/parity.md instead of checking it"
    )


def pytest_terminal_summary(terminalreporter):
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    properties = [dict(report.user_properties) for report in reports]
    compared = [found for found in properties if "combination" in found]
    if compared:
        combinations = len({found["combination"] for found in compared})
        same, heads = (sum(found[name] for found in compared) for name in ("same", "heads"))
        agree = sum(found["same"] == found["heads"] for found in compared)
        terminalreporter.write_line(
            f"{combinations} combinations of presses and their arguments, {len(compared)} runs "
            f"compared with kvpress: {agree} agree ({same:,} of {heads:,} heads)"
        )
