// The run: its figures, curves over steps (the numbers of metrics.jsonl), and settings.
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
function pointsOf([, , metric, factor = 1, ...ends]) {
  const { steps, metrics } = data.run, values = metrics[metric] ?? [];
  const at = i => [metric, ends[0] ?? metric, ends[1] ?? metric].map(name => factor * (metrics[name]?.[i] ?? values[i]));
  return steps.map((step, i) => [step, ...at(i)]).filter((_, i) => (values[i] ?? null) !== null);
}
const figureOf = (value, [, , , factor]) => factor ? value.toFixed(1) : digits(value, 3);
function trailing(points) {
  const span = Math.max(1, Math.floor(points.length / 10)), some = i => points.slice(Math.max(0, i - span + 1), i + 1);
  return points.map(([step], i) => [step, some(i).reduce((sum, [, value]) => sum + value, 0) / some(i).length]);
}
function curve(panel, constants) {
  const [title, unit] = panel, name = title + (unit && ` (${unit})`), points = pointsOf(panel);
  const [least, most] = extent(points.flatMap(([, , low, high]) => [low, high])), room = .05 * (most - least);
  if (!(most > least)) {
    if (points.length) constants.append(`${name}: ${figureOf(least, panel)} at each step. `);
    return [];
  }
  const low = least - room, high = most + room;
  const steps = points.map(([step]) => step), ends = [steps[0], steps.at(-1)];
  const x = step => LEFT + 8 + (WIDTH - LEFT - RIGHT - 16) * (step - ends[0]) / (ends[1] - ends[0] || 1);
  const y = value => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low);
  const path = (line, attributes) => make('path', { ...attributes,
    d: line.map(([step, value], i) => `${i ? 'L' : 'M'}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join('') });
  const svg = make('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: '0', role: 'img', 'aria-label': name });
  for (const value of ticks(low, high, 5))
    svg.append(make('path', { class: 'grid', d: `M${LEFT} ${y(value)}H${WIDTH - RIGHT}` }),
      make('text', { x: LEFT - 4, y: y(value) + 4, 'text-anchor': 'end' }, String(value)));
  for (const step of ticks(ends[0], ends[1] + 1e-6, 6).filter(Number.isInteger))
    svg.append(make('text', { x: x(step), y: HEIGHT - 20, 'text-anchor': 'middle' }, String(step)));
  svg.append(make('text', { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, 'text-anchor': 'middle' }, 'step'),
    make('text', { transform: `translate(12 ${(HEIGHT + TOP - BOTTOM) / 2}) rotate(-90)`, 'text-anchor': 'middle' }, unit));
  svg.append(path(points, { class: 'faint' }), path(panel[4] ? points : trailing(points), {}));
  for (const [step, value, low, high] of points.filter(point => point[3] > point[2]))
    svg.append(path([[step, low], [step, high]], {}), make('circle', { cx: x(step), cy: y(value), r: 3 }));
  const cursor = svg.appendChild(make('path', { class: 'cursor' }));
  let at = steps.length;
  const point = index => {
    at = Math.max(0, Math.min(steps.length - 1, index));
    const [step, value, ...interval] = points[at].map((one, i) => i ? figureOf(one, panel) : one);
    cursor.setAttribute('d', `M${x(step)} ${TOP}V${HEIGHT - BOTTOM}`);
    reading.textContent = `${name}, step ${step}: ${value}` + (interval[0] === interval[1] ? '' : ` (${interval.join('-')})`);
  };
  svg.addEventListener('mousemove', event => {
    const box = svg.getBoundingClientRect(), to = (event.clientX - box.left) * WIDTH / box.width;
    point(steps.reduce((best, step, i) => Math.abs(x(step) - to) < Math.abs(x(steps[best]) - to) ? i : best, 0));
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

if (data.run) {
  const { steps, max_steps: last, metrics, figures, settings } = data.run, step = steps.at(-1), { follow } = search;
  if (step < last) {
    document.querySelector('h1').append(`, step ${step} of ${last}`);
    follow.parentElement.hidden = false;
    search.addEventListener('input', () => location.replace('#' + new URLSearchParams(follow.checked ? new FormData(search) : '')));
    setInterval(() => follow.checked && location.reload(), 10000);
  }
  const section = document.getElementById('run'), more = document.getElementById('more'), notes = document.getElementById('notes');
  section.hidden = document.getElementById('logged').hidden = false;
  document.getElementById('figures').append(...Object.entries(figures).map(([name, text]) =>
    make('tr', {}, make('th', {}, name), make('td', {}, printed(text)))));
  const drawn = [], known = ['eval_accuracy_low', 'eval_accuracy_high'];
  for (const panel of PANELS)
    if (drawn.length < MOST) known.push(panel[2]) && drawn.push(...curve(panel, notes));
  notes.append(data.notes);
  document.getElementById('curves').append(...drawn);
  const others = Object.keys(metrics).filter(name => !known.includes(name)).sort();
  more.addEventListener('toggle', () => more.lastChild.append(...others.flatMap(name => curve([name, '', name], more.querySelector('p')))), { once: true });
  const [, made] = settings.match(/^# (.+)/) || []; // version, commit, date and command
  section.append(make('details', {}, make('summary', {}, 'How the run was made ', make('small', {}, made ? printed(made) : '')), make('pre', {}, settings)));
}
