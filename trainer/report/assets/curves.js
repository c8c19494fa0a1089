// Runs: their figures, curves over steps (the numbers of metrics.jsonl), and settings.
const WIDTH = 320, HEIGHT = 200, LEFT = 60, RIGHT = 8, TOP = 8, BOTTOM = 36, MOST = 8;
// Title, unit, metric, factor, metrics of its interval's ends; the first eight that vary are drawn.
const PANELS = [
  ['Held-out accuracy', '%, greedy', 'eval_accuracy', 100, 'eval_accuracy_low', 'eval_accuracy_high'],
  ['Reward', 'mean over completions', 'reward'],
  ['Groups without an advantage', '%', 'frac_reward_zero_std', 100],
  ['Entropy', 'nats per token', 'entropy'],
  ['Drop', 'nats per masked span', 'credit/drop_mean'],
  ['Length', 'tokens per completion', 'completions/mean_length'],
  ['Time', 'seconds per step', 'step_time'],
  ['Time of credit', 'seconds per step', 'time/credit'],
  ['Gradient norm', 'before clipping', 'grad_norm'],
  ['Spread of weights', 'standard deviation over tokens', 'credit/weight_std'],
];

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough)), made = [];
  const by = power * [1, 2, 5, 10].find(factor => factor * power >= rough);
  for (let i = Math.ceil(low / by - 1e-9); i * by <= high + by * 1e-9; i++) made.push(Number((i * by).toPrecision(6)));
  return made;
}
function pointsOf(run, [, , metric, factor = 1, ...ends]) {
  const at = i => [metric, ends[0] ?? metric, ends[1] ?? metric].map(name => run.metrics[name]?.[i] ?? run.metrics[metric]?.[i] ?? null);
  return run.steps.map((step, i) => [step, ...at(i)]).filter(([, value]) => value !== null)
    .map(([step, ...values]) => [step, ...values.map(value => value * factor)]);
}
const figureOf = (value, [, , , factor]) => factor ? value.toFixed(1) : digits(value, 3);
const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;
function trailing(points) {
  const span = Math.max(1, Math.floor(points.length / 10));
  return points.map(([step], i) => [step, mean(points.slice(Math.max(0, i - span + 1), i + 1).map(point => point[1]))]);
}
function meanOf(lines) {
  const at = new Map();
  for (const [step, value] of lines.flat()) at.set(step, [...(at.get(step) || []), value]);
  return [...at].filter(([, values]) => values.length === lines.length).map(([step, values]) => [step, mean(values)]);
}
function curve(panel, constants) {
  const [title, unit] = panel, name = title + (unit && ` (${unit})`), lines = data.runs.map(run => pointsOf(run, panel)), all = lines.flat();
  const [least, most] = extent(all.flatMap(([, , low, high]) => [low, high])), room = .05 * (most - least);
  if (!(most > least)) {
    if (all.length) constants.append(`${name}: ${figureOf(least, panel)} at each step. `);
    return [];
  }
  const low = least - room, high = most + room;
  const steps = [...new Set(all.map(([step]) => step))].sort((a, b) => a - b), ends = [steps[0], steps[steps.length - 1]];
  const x = step => LEFT + 8 + (WIDTH - LEFT - RIGHT - 16) * (step - ends[0]) / (ends[1] - ends[0] || 1);
  const y = value => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low);
  const path = (points, attributes) => make('path', { ...attributes,
    d: points.map(([step, value], i) => `${i ? 'L' : 'M'}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join('') });
  const svg = make('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: '0', role: 'img', 'aria-label': name });
  for (const value of ticks(low, high, 5))
    svg.append(make('path', { class: 'grid', d: `M${LEFT} ${y(value)}H${WIDTH - RIGHT}` }),
      make('text', { x: LEFT - 4, y: y(value) + 4, 'text-anchor': 'end' }, String(value)));
  for (const step of ticks(ends[0], ends[1] + 1e-6, 6).filter(Number.isInteger))
    svg.append(make('text', { x: x(step), y: HEIGHT - 20, 'text-anchor': 'middle' }, String(step)));
  svg.append(make('text', { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, 'text-anchor': 'middle' }, 'step'),
    make('text', { transform: `translate(12 ${(HEIGHT + TOP - BOTTOM) / 2}) rotate(-90)`, 'text-anchor': 'middle' }, unit));
  for (const group of new Set(data.runs.map(run => run.group))) {
    const own = { style: `--own: var(--r${group % 8})` }, members = lines.filter((_, k) => data.runs[k].group === group);
    for (const points of members) {
      svg.append(path(points, { ...own, class: 'faint' }));
      for (const [step, value, low, high] of points.filter(point => point[3] > point[2]))
        svg.append(path([[step, low], [step, high]], own), make('circle', { ...own, cx: x(step), cy: y(value), r: 3 }));
    }
    svg.append(path(meanOf(panel[4] ? members : members.map(trailing)), own));
  }
  const cursor = svg.appendChild(make('path', { class: 'cursor' }));
  let at = steps.length;
  const point = index => {
    at = Math.max(0, Math.min(steps.length - 1, index));
    cursor.setAttribute('d', `M${x(steps[at])} ${TOP}V${HEIGHT - BOTTOM}`);
    const values = data.runs.flatMap((run, k) => lines[k].filter(([step]) => step === steps[at]).map(([, value, from, to]) =>
      (data.runs.length > 1 ? run.name + ' ' : '') + figureOf(value, panel) + (to > from ? ` (${figureOf(from, panel)}-${figureOf(to, panel)})` : '')));
    reading.textContent = printed(`${name}, step ${steps[at]}: ${values.join(' \u00b7 ')}`);
  };
  svg.addEventListener('mousemove', event => {
    const box = svg.getBoundingClientRect(), to = (event.clientX - box.left) * WIDTH / box.width;
    const distances = steps.map(step => Math.abs(x(step) - to));
    point(distances.indexOf(Math.min(...distances)));
  });
  svg.addEventListener('mouseleave', () => cursor.removeAttribute('d'));
  svg.addEventListener('keydown', event => {
    const by = { ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    point(at + by);
  });
  return [make('figure', {}, make('figcaption', {}, make('strong', {}, title)), svg)];
}

if (data.runs) {
  const [{ steps, max_steps: last }] = data.runs, step = steps[steps.length - 1], { follow } = search;
  if (data.runs.length === 1 && step < last) {
    document.querySelector('h1').append(`, step ${step} of ${last}`);
    follow.parentElement.hidden = false;
    search.addEventListener('input', () => location.replace('#' + new URLSearchParams(follow.checked ? new FormData(search) : '')));
    setInterval(() => follow.checked && location.reload(), 10000);
  }
  const [columns, rows] = data.table, section = document.getElementById('runs'), more = document.getElementById('more');
  section.hidden = document.getElementById('logged').hidden = false;
  const key = run => run ? [make('i', { style: `--own: var(--r${run.group % 8})` })] : [];
  document.getElementById('figures').append(...columns.flatMap((name, i) => name ? [make('tr', {}, make('th', {}, name),
    ...rows.map((row, k) => make('td', {}, ...i ? [] : key(data.runs[k]), printed(row[i]))))] : []));
  const notes = document.getElementById('notes'), drawn = [], known = ['eval_accuracy_low', 'eval_accuracy_high'];
  for (const panel of PANELS)
    if (drawn.length < MOST) known.push(panel[2]) && drawn.push(...curve(panel, notes));
  notes.append(data.notes);
  document.getElementById('curves').append(...drawn);
  const others = new Set(data.runs.flatMap(run => Object.keys(run.metrics)).filter(name => !known.includes(name)).sort());
  more.addEventListener('toggle', () => more.lastChild.append(...[...others].flatMap(name => curve([name, '', name], more.querySelector('p')))), { once: true });
  section.append(...data.runs.map(({ name, settings }) => { // which begin with version, commit, date and command
    const [, made] = settings.match(/^# (.+)/) || [];
    return make('details', {}, make('summary', {}, `How ${printed(name)} was made `, make('small', {}, made ? printed(made) : '')), make('pre', {}, settings));
  }));
}
