"""How the pages of this repository become a site: `make docs` builds it, `make docs-serve` shows it while one writes.

* `notes`: every `[Note: …]` of the source, as one page, so that what cites one can link to it.
* `pages`: what the site shows of files that lie elsewhere: README, examples, results, help texts.
* `markup`: links, citations and names of the API in a page's Markdown.
* `docstrings`: the same for docstrings, an extension of what reads them.
* `offline`: what a built page would load from the network, which must be nothing.
* `hooks`: what mkdocs calls.
* `torch_internals`: writes docs/torch-internals.md, which is kept in the repository.

On GitHub the same files are read as they are; nothing here changes one.
"""
