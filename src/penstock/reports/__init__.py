"""HTML pages that load nothing: mail them, print them, read them on a phone or in a dark room.

One frame and one palette serve every page of Penstock: `templates/page.html`, `style.css` and `panels.css`.
`html_page` renders templates and prepares tables; `panels` and `plots` draw. Each page has a template in
`templates/`.
"""
