"""The course as web pages: the worked notebooks with their stored outputs, made into HTML by Sphinx and MyST-NB.

`pages` says which pages there are and writes what Sphinx reads, `links` where a link of a page leads, `extension` what
Sphinx does beyond its own, `build` puts it together. Nothing is executed.
"""
