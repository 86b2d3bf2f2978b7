"""Sphinx's settings for the site, read by Sphinx itself."""

project = "kvcourse"
language = "en"
extensions = ["myst_nb", "sphinx.ext.githubpages", "kvcourse.site.extension"]
suppress_warnings = ["myst.header"]  # a heading may skip a level

nb_execution_mode = "off"
nb_render_markdown_format = "myst"
nb_code_prompt_show, nb_code_prompt_hide = "Show a solution", "Hide the solution"  # nothing else is folded
myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = myst_dmath_allow_digits = False  # "$2 and $3" are prices
myst_disable_syntax = ["myst_line_comment", "myst_block_break", "myst_target", "myst_role"]  # not Jupyter's
myst_all_links_external = True  # kvcourse.site.extension sees to them

html_theme = "furo"
html_title = "kvcourse"
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["kvcourse.css"]
html_favicon = "static/icon.svg"
pygments_dark_style = "a11y-high-contrast-dark"
html_use_index = False
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
