// Looks at every board in Chromium, and clicks from Fleet to a pod; prints what was seen as JSON.
//
//   node drive.mjs CHROMIUM BASE_URL FOLDER_FOR_SCREENSHOTS UID...
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { chromium } from 'playwright-core';

const [executablePath, base, folder, ...uids] = process.argv.slice(2);
const SIZE = { width: 1440, height: 900 };
const BLOCKED = 'Blocked now, and by whom';
const MATRIX = 'Time in violation by service and priority';
const PODS = 'Pods and jobs with the longest violations';

mkdirSync(folder, { recursive: true });
const browser = await chromium.launch({
  executablePath,
  // Chromium refuses a sandbox as root; the pages are our own.
  args: ['--no-sandbox', '--disable-gpu'],
});

/** A page that notes the errors of its console. */
async function open() {
  const page = await browser.newPage({ viewport: SIZE });
  const errors = [];
  page.on('console', (message) => message.type() === 'error' && errors.push(message.text()));
  page.on('pageerror', (error) => errors.push(String(error.stack ?? error)));
  return { page, errors };
}

/** Wait until every panel has its data and is drawn, and stays so; return what the page shows. */
async function settled(page) {
  const QUIET = 600;
  await page.waitForFunction(
    (quiet) => {
      const panels = window.panelStates?.() ?? [];
      const drawn = ({ key }) => {
        const element = document.querySelector(`[data-viz-panel-key="${key}"]`);
        // More than its title.
        const content = element?.querySelector('canvas, [role="grid"], [data-empty]');
        return Boolean(content) || (element?.innerText.trim().split('\n').length ?? 0) > 1;
      };
      const done = panels.length > 0 && panels.every((panel) => panel.done && drawn(panel));
      // A variable that is looked up again makes panels ask again.
      window.doneSince = done ? (window.doneSince ?? performance.now()) : undefined;
      return done && performance.now() - window.doneSince > quiet;
    },
    QUIET,
    { timeout: 30_000, polling: 50 },
  );
  return page.evaluate(() =>
    window.panelStates().map((panel) => {
      const element = document.querySelector(`[data-viz-panel-key="${panel.key}"]`);
      const heading = element?.querySelector('h2');
      return {
        ...panel,
        text: element?.innerText ?? '',
        empty: !element || element.querySelector('[data-empty]') !== null,
        standIn: element?.querySelector('[data-stand-in]') !== null,
        titleCut: Boolean(heading && heading.scrollWidth > heading.clientWidth),
      };
    }),
  );
}

async function see({ page, errors }, name) {
  const panels = await settled(page);
  const path = join(folder, `${name}.png`);
  // As tall as the board: panels below the fold are part of it.
  const { scrollHeight } = await page.evaluate(() => ({ scrollHeight: document.documentElement.scrollHeight }));
  await page.setViewportSize({ ...SIZE, height: Math.max(SIZE.height, scrollHeight) });
  await page.waitForTimeout(300);
  await page.screenshot({ path });
  await page.setViewportSize(SIZE);
  return {
    name,
    url: page.url(),
    heading: await page.locator('h1').innerText(),
    text: await page.locator('main').innerText(),
    background: await page.evaluate(() => getComputedStyle(document.body).backgroundColor),
    unsupported: await page.locator('[data-unsupported]').allInnerTexts(),
    errors: [...errors],
    screenshot: path,
    panels,
  };
}

function panelOf(page, panels, title) {
  const { key } = panels.find((panel) => panel.title === title) ?? {};
  return page.locator(`[data-viz-panel-key="${key}"]`);
}

/** The cells of each row of a table panel, with the link of each. */
async function rows(panel) {
  return panel.locator('[role="row"]').evaluateAll((found) =>
    found.map((row) =>
      [...row.querySelectorAll('[role="gridcell"], [role="columnheader"]')].map((cell) => ({
        text: cell.innerText,
        href: cell.querySelector('a')?.getAttribute('href') ?? null,
      })),
    ),
  );
}

async function click(panel, text, href) {
  await panel.locator(`[role="gridcell"] a[href="${href}"]`, { hasText: text }).first().click();
}

/** Fleet, click a cell of the matrix; Service, click a pod; Pod. The second data source and half an hour must stay. */
async function drillDown() {
  const tab = await open();
  const { page } = tab;
  await page.goto(`${base}/d/prioscope-fleet?var-datasource=second&from=now-30m&to=now`);
  const fleet = await see(tab, 'drill-1-fleet');
  const matrix = await rows(panelOf(page, fleet.panels, MATRIX));
  const [headings, ...services] = matrix;
  // A service of which something is blocked now at P0, the most urgent level, as an engineer on call would choose it.
  const column = headings.findIndex(({ text }) => text === 'P0');
  const blocked = (await rows(panelOf(page, fleet.panels, BLOCKED))).map((cells) => cells.map(({ text }) => text));
  const row = services.find(
    ([service, ...cells]) =>
      /[1-9]/.test(cells[column - 1].text) && blocked.some((texts) => texts[0] === 'P0' && texts[1] === service.text),
  );
  const cell = row[column];
  await click(panelOf(page, fleet.panels, MATRIX), cell.text, cell.href);
  await page.waitForURL('**/d/prioscope-service**');
  const service = await see(tab, 'drill-2-service');
  const pods = await rows(panelOf(page, service.panels, PODS));
  const pod = pods.flat().find(({ href }) => href?.includes('/d/prioscope-pod'));
  await click(panelOf(page, service.panels, PODS), pod.text, pod.href);
  await page.waitForURL('**/d/prioscope-pod**');
  const last = await see(tab, 'drill-3-pod');
  await page.goBack();
  await page.waitForURL('**/d/prioscope-service**');
  return {
    matrix,
    clicked: { service: row[0].text, level: 'P0', cell: cell.text, pod: pod.text },
    fleet,
    service,
    pods,
    pod: last,
    back: page.url(),
  };
}

const looks = [];
for (const theme of ['dark', 'light']) {
  const tab = await open();
  for (const uid of uids) {
    tab.errors.length = 0;
    await tab.page.goto(`${base}/d/${uid}?theme=${theme}`);
    looks.push({ uid, theme, ...(await see(tab, `${uid}-${theme}`)) });
  }
  await tab.page.close();
}
const drill = await drillDown();
await browser.close();
process.stdout.write(JSON.stringify({ looks, drill }));
