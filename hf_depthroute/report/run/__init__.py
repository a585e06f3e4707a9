"""One HTML page about a routed model: `collect` measures, `tokens` and `pieces` make the token view, `charts` draws,
`page` renders. The page is one file that loads nothing."""
