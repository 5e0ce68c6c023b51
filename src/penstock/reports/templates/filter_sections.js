// Shows the sections and findings whose marks are ticked and that have the word in the search field.
const boxes = [...document.querySelectorAll('.controls input[type=checkbox]')];
const [ofSections, ofFindings] = [...new Set(boxes.map(box => box.name))];
const search = document.querySelector('.controls input[type=search]');
const byId = id => document.getElementById(decodeURIComponent(id));
function filter() {
  const ticked = group => new Set(boxes.filter(b => b.checked && b.name === group).map(b => b.value));
  const sections = ticked(ofSections), findings = ticked(ofFindings), word = search.value.toLowerCase();
  for (const section of document.querySelectorAll('section[data-mark]')) {
    let shown = 0;
    for (const finding of section.querySelectorAll('.finding')) {
      finding.hidden = !findings.has(finding.dataset.mark)
        || (word !== '' && !finding.textContent.toLowerCase().includes(word));
      shown += finding.hidden ? 0 : 1;
    }
    const nothing = section.querySelector('.nothing');
    if (nothing) nothing.hidden = shown > 0;
    section.hidden = !sections.has(section.dataset.mark) || (word !== '' && shown === 0);
  }
  // A row that leads to a section is shown if its verdict is ticked.
  for (const link of document.querySelectorAll('td a[href^="#"]')) {
    const section = byId(link.getAttribute('href').slice(1));
    if (section?.dataset.mark) link.closest('tr').hidden = !sections.has(section.dataset.mark);
  }
}
document.querySelector('.controls').addEventListener('input', filter);
filter();
