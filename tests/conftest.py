"""Settings for all tests."""

from hypothesis import HealthCheck, settings

# The same examples on every machine and on every rank, whatever a first call costs.
settings.register_profile(
    "nvdd_md",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("nvdd_md")
