"""When a loop boundary's norm fires."""

from hypothesis import given
from hypothesis import strategies as st

from lib.boundary import Boundary


@given(st.integers(0, 5), st.integers(0, 40))
def test_a_boundary_fires_before_steps_that_follow_each_kth(period, t):
    assert Boundary(period).fires_before(t) == (period > 0 and t in range(period, 41, period))
