"""The oracle's own option."""


def pytest_addoption(parser):
    parser.addoption(
        "--write-parity", action="store_true", help="write docs/parity.md instead of checking it"
    )
