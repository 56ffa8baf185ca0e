"""What lies beside `docs/` and is linked from it comes along to the site: scripts, and notebooks as pages.

On a git host `../examples/abstain.py` and `../notebooks/first_steps.ipynb` lead to the files themselves.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]


def notebook_page(path: Path) -> str:
    """A notebook as Markdown."""
    parts: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/", "](../").replace(".ipynb)", ".md)"))
        else:
            parts.append(f"```python\n{source}\n```")
    parts.append(f"To run it yourself: [{path.name}]({path.name}).")
    return "\n\n".join(parts)


def on_files(files: Files, config: Any) -> Files:
    """Add scripts and notebooks."""
    beside = [*ROOT.glob("examples/*.py"), ROOT / "results" / "README.md"]
    made: dict[str, str | bytes] = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in beside}
    for path in ROOT.glob("notebooks/*.ipynb"):
        made |= {f"notebooks/{path.stem}.md": notebook_page(path), f"notebooks/{path.name}": path.read_bytes()}
    for name, content in made.items():
        files.append(File.generated(config, name, content=content, inclusion=InclusionLevel.INCLUDED))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave `docs/` lead to what `on_files` added."""
    up = "../" * page.file.src_uri.count("/")
    for folder in ("examples", "results"):
        markdown = markdown.replace(f"]({up}../{folder}/", f"]({up}{folder}/")
    return re.sub(rf"\]\({re.escape(up)}\.\./notebooks/(\w+)\.ipynb", rf"]({up}notebooks/\1.md", markdown)
