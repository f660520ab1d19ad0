"""What a family is known by: each file of one has entries (`Family`), imported when first asked for."""

from functools import cache

from deltaserve.core.branches import FAMILIES
from deltaserve.core.errors import ConfigError
from deltaserve.core.files.branch_code import load_branch
from deltaserve.model.family import Family
from deltaserve.model.fields import Fields


@cache
def families() -> tuple[Family, ...]:
    """All that there are, in the order of core/branches.py."""
    return tuple(family for branch in FAMILIES.values() for family in load_branch(branch).FAMILIES)


def family_of(fields: Fields) -> Family:
    """The family of the class named in `architectures`; nothing is guessed from other fields."""
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.error("architectures", "a list with one class name")
    for family in families():
        if family.architecture == names[0]:
            return family
    supported = ", ".join(dict.fromkeys(family.architecture.partition("For")[0] for family in families()))
    raise ConfigError(f"{fields.where}: architecture {names[0][:80]!r} is not supported; supported: {supported}")


def family_named(model_type: str) -> Family:
    """The family of a spec that was built here, by its `model_type`."""
    (family,) = (family for family in families() if family.model_type == model_type)
    return family
