"""Whose a namespace is, whatever its salts contain."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from deltaserve.core.ids import Namespace
from deltaserve.core.namespaces import narrowed, tenant_of

TENANTS = st.text("abcXYZ019_.-", max_size=64).map(Namespace)
SALTS = st.lists(st.text(max_size=20) | st.from_regex("[0-9]{1,3}:[a+]{0,4}"), max_size=3)


def salted(namespace: Namespace, salts: Sequence[str]) -> Namespace:
    for salt in salts:
        namespace = narrowed(namespace, salt)
    return namespace


@given(tenant=TENANTS, salts=SALTS)
def test_a_tenant_is_known_under_every_salt(tenant: Namespace, salts: list[str]) -> None:
    assert tenant_of(salted(tenant, salts)) == tenant


@given(tenant=TENANTS, other=TENANTS, salts=SALTS, other_salts=SALTS)
def test_no_two_are_alike(tenant: Namespace, other: Namespace, salts: list[str], other_salts: list[str]) -> None:
    is_same = (tenant, salts) == (other, other_salts)
    assert (salted(tenant, salts) == salted(other, other_salts)) is is_same
