"""The documentation as a site, built without a network: `python -m tools.docs_site [FOLDER]` (by default out/site).

Its pages are docs/*.md and the pages beside the code: `src/deltaserve/X/README.md` becomes `code/X.md`, with a list of
X's modules made from their docstrings, which are read with `ast`: nothing is imported. Sphinx with MyST (the extra
`docs`) makes HTML of them; a link that leads nowhere ends the build with an error.
"""

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from posixpath import normpath, relpath

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "deltaserve"
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#:\s]+)(#[^)]*)?\)")
_SECTIONS = (
    ("Start", ("quickstart", "when-does-it-pay", "troubleshooting", "not-there-yet")),
    (
        "Operate",
        ("deploy", "operations", "settings", "tools", "structured-output", "clients", "reliability", "dependencies"),
    ),
    ("Understand", ("architecture", "safety", "features", "performance")),
)
_CONF = """
project = "deltaserve"
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "deltaserve"
exclude_patterns = []
suppress_warnings = ["misc.highlighting_failure"]
"""


def site_pages() -> dict[str, str]:
    """Address below the site's sources |-> markdown."""
    documents = sorted((ROOT / "docs").rglob("*.md"))
    pages = {path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in documents}
    pages |= {address(path): page_of_code(path) for path in sorted(SOURCE.rglob("README.md"))}
    known = frozenset(pages)
    return {uri: rewritten(text, uri, known) for uri, text in pages.items()}


def address(page: Path) -> str:
    """`code/control/sched.md` for the page of src/deltaserve/control/sched."""
    return f"code/{page.parent.relative_to(SOURCE).as_posix()}.md"


def page_of_code(page: Path) -> str:
    """The page, and below it a table of the modules in its folder."""
    rows = [f"| `{module.name}` | {summary(module)} |" for module in sorted(page.parent.glob("[a-z]*.py"))]
    return page.read_text() + "\n".join(["", "## Modules", "", "| file | |", "|---|---|", *rows, ""] if rows else [])


def summary(module: Path) -> str:
    """First paragraph of a module's docstring, for a cell of a table."""
    text = (ast.get_docstring(ast.parse(module.read_text())) or "").partition("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|")


def rewritten(markdown: str, uri: str, known: frozenset[str]) -> str:
    """The page with its links as the site has them; of a link to another file of the repository the text stays."""
    here, origin = Path(uri).parent.as_posix(), Path(origin_of(uri)).parent.as_posix()

    def replace(match: re.Match[str]) -> str:
        text, target, anchor = match[1], normpath(f"{origin}/{match[2]}"), match[3] or ""
        is_page = target.startswith("src/deltaserve/") and target.endswith("/README.md")
        site = address(ROOT / target) if is_page else target.removeprefix("docs/")
        if site in known:
            return f"[{text}]({relpath(site, here)}{anchor})"
        if (ROOT / target).exists():
            return f"{text} (`{target}`)"
        return match[0]

    return _LINK.sub(replace, markdown)


def origin_of(uri: str) -> str:
    """Where the page of this address lies in the repository."""
    if uri.startswith("code/"):
        return f"src/deltaserve/{uri.removeprefix('code/').removesuffix('.md')}/README.md"
    return f"docs/{uri}"


def contents(pages: dict[str, str]) -> str:
    """Tables of contents: the sections, the code by package, the history."""
    code = sorted(uri.removesuffix(".md") for uri in pages if uri.startswith("code/"))
    history = sorted(uri.removesuffix(".md") for uri in pages if uri.startswith("history/"))
    sections = [*_SECTIONS, ("Code", tuple(code)), ("History", tuple(history))]
    trees = [
        "\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *entries, "```", ""])
        for title, entries in sections
    ]
    return "\n" + "\n".join(trees)


def write_sources(folder: Path) -> None:
    pages = site_pages()
    pages["index.md"] += contents(pages)
    for uri, text in pages.items():
        (folder / uri).parent.mkdir(parents=True, exist_ok=True)
        (folder / uri).write_text(text)
    for picture in (ROOT / "docs").glob("*.png"):
        shutil.copy(picture, folder)
    (folder / "conf.py").write_text(_CONF)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.docs_site", description="Build the documentation as HTML.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "out" / "site", help="where the HTML goes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as sources:
        write_sources(Path(sources))
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
        code = subprocess.run([*command, sources, str(arguments.folder)], check=False).returncode
    print(f"{arguments.folder}/index.html" if code == 0 else "the site was not built: see above", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
