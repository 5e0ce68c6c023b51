// Shows the findings and results whose verdicts are ticked and that have the word in the search field.
const boxes = [...document.querySelectorAll('.controls input[type=checkbox]')];
const search = document.querySelector('.controls input[type=search]');
function filter() {
  const ticked = group => new Set(boxes.filter(b => b.checked && b.name === group).map(b => b.value));
  const verdicts = ticked('finding'), validities = ticked('result'), word = search.value.toLowerCase();
  for (const row of document.querySelectorAll('tr[data-verdict]'))
    row.hidden = !validities.has(row.dataset.verdict);
  for (const section of document.querySelectorAll('section[data-verdict]')) {
    let shown = 0;
    for (const finding of section.querySelectorAll('.finding')) {
      finding.hidden = !verdicts.has(finding.dataset.verdict)
        || (word !== '' && !finding.textContent.toLowerCase().includes(word));
      shown += finding.hidden ? 0 : 1;
    }
    section.querySelector('.nothing').hidden = shown > 0;
    section.hidden = !validities.has(section.dataset.verdict) || (word !== '' && shown === 0);
  }
}
document.querySelector('.controls').addEventListener('input', filter);
filter();
