"""Options of pytest for `dsv4_parity.testing`, and the fixture `case`."""

import pytest

from dsv4_parity import testing


def pytest_addoption(parser):
    group = parser.getgroup("parity")
    group.addoption(
        "--parity-profile",
        choices=["smoke", "quick", "ci", "full"],
        help="how many cases, and how large: for all tests with cases",
    )
    group.addoption(
        "--parity-seed", metavar="SEED", help="seed of drawn cases, or `fresh` for a new one"
    )


_BEFORE = pytest.StashKey()


def pytest_configure(config):
    seed = config.getoption("--parity-seed")
    # The processes of pytest-xdist have one seed.
    seed = getattr(config, "workerinput", {}).get("parity_seed", seed)
    if seed == "fresh":
        seed = testing.fresh_seed()
    try:
        seed = None if seed is None else int(seed)
    except ValueError:
        raise pytest.UsageError(f"--parity-seed {seed!r} is no number, and not `fresh`") from None
    config.stash[_BEFORE] = dict(testing._options)
    testing._options.update(seed=seed, profile=config.getoption("--parity-profile"))


def pytest_unconfigure(config):
    # A session within a session, such as a test of a plugin, leaves the options of the outer one.
    testing._options.update(config.stash.get(_BEFORE, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["parity_seed"] = testing._options["seed"]


def pytest_report_header(config):
    seed, profile = testing._options["seed"], testing._options["profile"]
    if seed is None and profile is None:
        return None
    return f"parity: profile {profile or 'as tests say'}, seed {'1' if seed is None else seed}"


@pytest.fixture
def case(request):
    """The case of a test with `dsv4_parity.testing.cases`."""
    return testing.Case(request.param.line)
