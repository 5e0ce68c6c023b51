"""HTML pages that load nothing: mail them, print them, read them on a phone or in a dark room.

One frame and one palette serve every page of Penstock: `templates/page.html` and `templates/style.css`.
`html_page` renders templates and prepares tables; `plots` draws. Each page has a template in `templates/`.
"""
