"""The environment variables that the engine reads, declared once.

Read by any floor through `envs.NAME.get()`, which looks the value up at each call. Must not cache or import
anything of ours; nothing else may read the process environment.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

__all__ = ["EnvVar", "Envs", "child_environment", "envs"]

T = TypeVar("T")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError("use one of 1/true/yes/on or 0/false/no/off")


def _parse_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it is not UTF-8; rename the file or folder, or give a link to it") from error
    return text


class EnvVar(Generic[T]):
    """One variable: its name is the attribute it is bound to on `Envs`."""

    def __init__(self, parse: Callable[[str], T], default: T, doc: str, *, foreign: bool = False) -> None:
        self._parse = parse
        self.default = default
        self.doc = doc
        #: Another library reads it too and accepts values that we do not.
        self.foreign = foreign
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def get(self) -> T:
        """The value now: the environment's if set, else the declared default."""
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        try:
            return self._parse(text)
        except ValueError as error:
            raise ValueError(
                f"environment variable {self.name}={text!r} is not understood: {error}"
            ) from error

    def is_set(self) -> bool:
        return self.name in os.environ

    def set(self, value: T | None) -> None:
        """Set it for this process and its children; None removes it."""
        if value is None:
            os.environ.pop(self.name, None)
        elif isinstance(value, bool):
            os.environ[self.name] = "1" if value else "0"
        else:
            os.environ[self.name] = str(value)

    @contextmanager
    def override(self, value: T | None) -> Iterator[None]:
        """Set another value for the length of a block."""
        before = os.environ.get(self.name)
        self.set(value)
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(self.name, None)
            else:
                os.environ[self.name] = before


def _bool(default: bool, doc: str) -> EnvVar[bool]:
    return EnvVar(_parse_bool, default, doc)


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("use a whole number") from None


def _parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("use a number") from None


def _int(default: int, doc: str, *, at_least: int | None = None) -> EnvVar[int]:
    def parse(text: str) -> int:
        number = _parse_int(text)
        if at_least is not None and number < at_least:
            raise ValueError(f"it must be at least {at_least}")
        return number

    return EnvVar(parse, default, doc)


def _opt_int(doc: str, *, foreign: bool = False) -> EnvVar[int | None]:
    return EnvVar[int | None](_parse_int, None, doc, foreign=foreign)


def _float(default: float, doc: str) -> EnvVar[float]:
    return EnvVar(_parse_float, default, doc)


def _str(doc: str) -> EnvVar[str | None]:
    return EnvVar[str | None](_parse_text, None, doc)


class Envs:
    """The whole list; a variable that is not here is never read."""

    # Health and life-cycle
    SGLANG_HEALTH_CHECK_TIMEOUT = _int(
        20, "seconds a health probe may wait before it answers 503", at_least=1
    )
    SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION = _bool(True, "/health_generate really generates one token")
    SGLANG_WARMUP_TIMEOUT = _int(-1, "seconds the start-up self-test may take; -1 means 600")
    SGLANG_TIMEOUT_KEEP_ALIVE = _int(
        75, "seconds an idle HTTP connection is kept; longer than a proxy or client keeps its own", at_least=1
    )
    SGLANG_FORCE_SHUTDOWN = _bool(False, "end at once on SIGTERM instead of draining")
    SGLANG_RUNTIME_DIR = _str("folder for sockets of running servers; default is under the temporary folder")

    # Requests
    SGLANG_REQ_WAITING_TIMEOUT = _float(-1.0, "seconds a request may queue before 503; negative: no limit")
    SGLANG_REQ_RUNNING_TIMEOUT = _float(-1.0, "seconds a request may run before 503; negative: no limit")
    SGLANG_REQUEST_STATE_WAIT_TIMEOUT = _float(1.0, "seconds between looks whether a client has hung up")
    SGLANG_MAX_NEW_TOKENS_LIMIT = _opt_int("ceiling on max_new_tokens of any request")
    SGLANG_FORCE_STREAM_INTERVAL = _int(
        50, "tokens between internal pushes of requests that do not stream", at_least=1
    )
    SGLANG_DETOKENIZER_MAX_STATES = _int(65536, "detokenizer states kept at once", at_least=1)

    # Scheduling estimates
    SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION = _int(4096, "tokens; cap of one request's share in admission")
    SGLANG_INIT_NEW_TOKEN_RATIO = _float(0.7, "first guess of used / allowed output tokens")
    SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR = _float(0.14, "lower end of that guess, as a factor of the first")
    SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS = _int(600, "decode steps from the first guess to the lower end")
    SGLANG_RETRACT_DECODE_STEPS = _int(20, "decode steps of room kept free when requests are retracted")

    # Models and numbers
    SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN = _bool(False, "permit a context above the model's own")

    # CPU
    SGLANG_USE_CPU_ENGINE = _bool(False, "choose the CPU engine even when a GPU is present")
    SGLANG_USE_CPU_KERNELS = _bool(True, "use the compiled kernels of sgl_kernel where they are installed")
    SGLANG_SPEC_SKIP_SLOW_DRAFTS = _bool(
        True, "on a CPU, run plain rounds where drafts were measured to be slower, for each batch size"
    )
    SGL_KERNEL_ISA = _str("instruction set of the compiled kernels; default is the best of the processor")
    SGLANG_CACHE_DIR = _str("folder for what is measured once; default is ~/.cache/sglang")
    SGLANG_CPU_OMP_THREADS_BIND = _str("core lists such as 0-15|16-31, one per tensor rank")
    OMP_NUM_THREADS = _opt_int(
        "threads of this process, of torch and of the compiled kernels each; a rank: its share of the cores",
        foreign=True,
    )
    OMP_WAIT_POLICY = _str("PASSIVE keeps waiting OpenMP threads from spinning")
    GOMP_SPINCOUNT = _opt_int(
        "looks an OpenMP thread takes before it sleeps; a rank of several threads: 10000", foreign=True
    )

    # Cluster
    GLOO_SOCKET_IFNAME = _str(
        "network interface of gloo; by default lo when all ranks share the host, else the one that leads to "
        "--dist-init-addr"
    )

    # Logs, traces, profiles
    SGLANG_TRACE_LEVEL = _int(3, "detail of request traces, 0 (none) to 3")
    SGLANG_LOGGING_CONFIG_PATH = _str("JSON file for logging.config.dictConfig")
    SGLANG_LOG_MS = _bool(False, "show milliseconds in log time stamps")
    DISABLE_OPENAPI_DOC = _bool(False, "do not serve /docs and /openapi.json")

    @classmethod
    def declared(cls) -> dict[str, "EnvVar[object]"]:
        """Every variable by name, in declaration order (docs and tests walk this)."""
        return {name: value for name, value in vars(cls).items() if isinstance(value, EnvVar)}

    def check(self) -> None:
        """Raise `ValueError` for every value that is not understood.

        A wrong one would otherwise fail where it is first needed, which may be in the middle of serving.
        """
        sentences = []
        for variable in self.declared().values():
            try:
                if not variable.foreign:
                    variable.get()
            except ValueError as error:
                sentences.append(str(error))
        if sentences:
            raise ValueError("\n".join(sentences))


envs = Envs()


def child_environment(**defaults: str) -> dict[str, str]:
    """The environment of a child process: ours, with `defaults` for what is not set."""
    return {**defaults, **os.environ}
