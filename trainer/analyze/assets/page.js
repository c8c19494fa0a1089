const reading = document.getElementById('reading');
const rest = reading.textContent;
let current = null;
function token(block, index) { return block.querySelectorAll('span[title]')[index]; }
function show(block, index) {
  const article = block.closest('article');
  for (const old of document.querySelectorAll('.here')) old.classList.remove('here');
  const parts = [];
  for (const other of article.querySelectorAll('.tokens')) {
    const found = token(other, index);
    if (!found) continue;
    found.classList.add('here');
    parts.push(other.getAttribute('aria-label') + ' ' + found.title);
  }
  const text = '\u2068' + token(block, index).textContent + '\u2069';
  reading.textContent = 'Token ' + index + ' \u201c' + text + '\u201d: ' + parts.join(' \u00b7 ');
  current = [block, index];
}
for (const block of document.querySelectorAll('.tokens')) {
  const all = block.querySelectorAll('span[title]');
  const places = new Map([...all].map((found, index) => [found, index]));
  block.addEventListener('mouseover', event => {
    const found = event.target.closest('span[title]');
    if (places.has(found)) show(block, places.get(found));
  });
  block.addEventListener('focus', () => {
    if (all.length) show(block, current && current[0].closest('article') === block.closest('article') ? current[1] : 0);
  });
  block.addEventListener('keydown', event => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9 }[event.key];
    if (by === undefined || !all.length) return;
    event.preventDefault();
    const from = current && current[0] === block ? current[1] : 0;
    show(block, Math.max(0, Math.min(all.length - 1, from + by)));
    all[current[1]].scrollIntoView({ block: 'nearest' });
  });
}
addEventListener('keydown', event => {
  if (event.key !== 'Escape') return;
  for (const old of document.querySelectorAll('.here')) old.classList.remove('here');
  reading.textContent = rest;
  current = null;
});
