"""The words a configuration field is declared with, and how a declaration is read back.

Read by `fields/*`, which declare, and by whatever is built from the declarations: the record, the command
line, the published namespaces, the docs. Must not know any particular field, parse a command line or decide a
value.
"""

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)
from typing import Annotated as A

import msgspec

__all__ = [
    "A",
    "Arg",
    "Derived",
    "Input",
    "Leaf",
    "NS",
    "Namespace",
    "REQUIRED",
    "Served",
    "leaves_of",
    "derived_of",
]

REQUIRED: Final[Any] = msgspec.NODEFAULT

#: True: every value works. False: only the default. A tuple: these values (beside the default).
Served = bool | tuple[object, ...]

T = TypeVar("T")

Kind = Literal["switch", "toggle", "int", "float", "str", "list", "json"]


@dataclass(frozen=True, slots=True)
class NS:
    """Where a leaf lives in the published context: `NS("exec.kernel")` is `get_exec().kernel`."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arg:
    """Everything about one field except its name, type and default."""

    help: str
    #: Resolution may set it when the operator did not.
    resolvable: bool = False
    #: Option string in place of `--field-name`; None: not on the command line.
    cli: str | None = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str | int, ...] | None = None
    #: Which values this build can run; everything else is refused at the start.
    served: Served = False
    #: What to do in place of an unserved value, as the end of a sentence.
    instead: str = ""
    #: What to write in place of a deprecated spelling.
    deprecated: str = ""
    #: Never shown by information routes or logs.
    secret: bool = False
    #: Accepts 1k / 1Ki style numbers.
    human_int: bool = False
    #: Smallest legal number.
    at_least: float | None = None
    #: Largest legal number.
    at_most: float | None = None
    #: A legal number outside these limits, for instance -1 for "off".
    or_exactly: int | None = None


@dataclass(frozen=True)
class Derived(Generic[T]):
    """A published value that no flag sets.

    `compute` takes the inputs by keyword. Without it the widths of the context (`runtime_context/widths.py`)
    produce the whole family at once.
    """

    help: str
    inputs: tuple[str, ...]
    compute: Callable[..., T] | None = None

    if TYPE_CHECKING:  # what a reader of the published namespace gets

        def __get__(self, instance: object, owner: type) -> T: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A setting that is no field of its own but sets other fields."""

    name: str
    type: type
    help: str
    #: (its value, the fields stated beside it) -> the fields it sets. Raises ValueError with the rule.
    expand: Callable[[Any, Mapping[str, Any]], dict[str, Any]]
    aliases: tuple[str, ...] = ()
    deprecated: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        return (f"--{self.name.replace('_', '-')}", *self.aliases)

    @property
    def label(self) -> str:
        """What messages call the setting."""
        return self.flags[0]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One declared field, read back from its namespace class."""

    name: str
    namespace: str
    type: Any
    default: Any
    arg: Arg
    kind: Kind = field(default="str")

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def flags(self) -> tuple[str, ...]:
        """All option strings, the main one first; empty where the command line has none."""
        if self.arg.cli is None:
            return ()
        return (self.arg.cli or f"--{self.name.replace('_', '-')}", *self.arg.aliases)

    @property
    def label(self) -> str:
        """What messages call the field: its main option string, or its name."""
        return self.flags[0] if self.flags else self.name

    @property
    def deprecated(self) -> str:
        return self.arg.deprecated


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Namespace:
    """Base of a declaration class: `class Kernel(Namespace, ns=NS("exec.kernel"))`.

    Never instantiated: it is the type under which the published namespace is read.
    """

    NAMESPACE: ClassVar[str] = ""

    def __init_subclass__(cls, *, ns: NS | None = None) -> None:
        if ns is not None:
            cls.NAMESPACE = ns.path


def strip_optional(tp: object) -> tuple[object, bool]:
    """`int | None` -> (int, True); `int` -> (int, False)."""
    if get_origin(tp) in (Union, types.UnionType):
        rest = [t for t in get_args(tp) if t is not type(None)]
        if len(rest) == 1:
            return rest[0], True
    return tp, False


def kind_of(tp: object) -> Kind:
    inner, optional = strip_optional(tp)
    if inner is bool:
        return "toggle" if optional else "switch"
    if inner is int:
        return "int"
    if inner is float:
        return "float"
    if get_origin(inner) is list:
        return "list"
    if inner is str:
        return "str"
    return "json"


def _read_annotation(owner: str, name: str, annotation: Any, namespace: str) -> tuple[Any, Arg, str]:
    if get_origin(annotation) is not A:
        raise TypeError(f"{owner}.{name} must be declared as A[type, Arg(...)]")
    tp, *marks = get_args(annotation)
    args = [mark for mark in marks if isinstance(mark, Arg)]
    if len(args) != 1:
        raise TypeError(f"{owner}.{name} needs exactly one Arg(...), found {len(args)}")
    places = [mark.path for mark in marks if isinstance(mark, NS)]
    return tp, args[0], places[0] if places else namespace


def leaves_of(cls: type) -> dict[str, Leaf]:
    """The annotated half of a declaration class, in order. Un-annotated attributes are not leaves."""
    default_namespace = getattr(cls, "NAMESPACE", "")
    found: dict[str, Leaf] = {}
    for name, annotation in inspect.get_annotations(cls).items():
        tp, arg, namespace = _read_annotation(cls.__name__, name, annotation, default_namespace)
        default = vars(cls).get(name, REQUIRED)
        found[name] = Leaf(name, namespace, tp, default, arg, kind_of(tp))
    return found


def derived_of(cls: type) -> dict[str, Derived[object]]:
    """The `Derived` half of a declaration class, in order."""
    return {name: value for name, value in vars(cls).items() if isinstance(value, Derived)}
