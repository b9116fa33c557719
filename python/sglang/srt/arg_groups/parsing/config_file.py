"""`--config file.yaml`: the same settings as the command line, one key each.

Used by the command line only. Must not expand or resolve anything: it returns what the file states.
"""

from pathlib import Path

from sglang.srt.arg_groups.parsing.spellings import stated_from


def read_config_file(path: str) -> dict[str, object]:
    """Settings by declared name. Keys may use any long spelling, with dashes or underscores."""
    import yaml  # kept out of start-up: most servers have no file

    try:
        text = Path(path).read_text(encoding="utf-8")
        parsed = yaml.safe_load(text)
        root = yaml.compose(text, yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"--config {path} is not YAML: {problem or error}{where}") from error
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise ValueError(f"--config {path} must hold `setting: value` lines, found a {type(parsed).__name__}")
    # The YAML library silently takes the last of two equal keys.
    keys = [key.value for key, _ in root.value] if root else []
    twice = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
    if twice:
        raise ValueError(f"--config {path}: {twice[0]!r} is there twice; keep one")
    return stated_from(parsed, f"--config {path}")
