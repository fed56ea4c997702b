// Builds the host page, and serves it with what Grafana's server would serve: the boards, the data source, icons, fonts.
import { createReadStream, existsSync, readFileSync, readdirSync } from 'node:fs';
import { basename, join, resolve } from 'node:path';
import { defineConfig, type Plugin } from 'vite';

const here = import.meta.dirname;
const boards = resolve(process.env.BOARDS ?? join(here, '../../dashboards/generated'));
const prometheus = process.env.PROMETHEUS_URL ?? 'http://127.0.0.1:9090';
const interval = process.env.SCRAPE_INTERVAL ?? '15s';

/** Two data sources over one Prometheus, so that a link which drops the data source is seen. */
const dataSources = [
  { uid: 'first', name: 'First', isDefault: true, interval },
  { uid: 'second', name: 'Second', isDefault: false, interval },
];

const fonts: Record<string, string> = {
  'Inter-Regular.woff2': '@fontsource/inter/files/inter-latin-400-normal.woff2',
  'Inter-Medium.woff2': '@fontsource/inter/files/inter-latin-500-normal.woff2',
  'Inter-Italic.woff2': '@fontsource/inter/files/inter-latin-400-italic.woff2',
  'Inter-MediumItalic.woff2': '@fontsource/inter/files/inter-latin-500-italic.woff2',
};

/** All boards, by uid; read at each request, so that a rebuilt board shows after a reload. */
function readBoards(): Map<string, object> {
  const found = new Map<string, object>();
  for (const name of readdirSync(boards).filter((file) => file.endsWith('.json'))) {
    const board = JSON.parse(readFileSync(join(boards, name), 'utf8')) as { uid: string };
    found.set(board.uid, board);
  }
  return found;
}

function file(path: string): string | undefined {
  if (path.startsWith('/public/build/img/icons/')) {
    const icon = path.slice('/public/build/img/icons/'.length);
    const found = resolve(here, 'node_modules/@grafana/ui/dist/public/img/icons', icon);
    return found.startsWith(here) && existsSync(found) ? found : undefined;
  }
  if (path.startsWith('/public/fonts/')) {
    const font = fonts[basename(path)] ?? '@fontsource/roboto-mono/files/roboto-mono-latin-400-normal.woff2';
    return join(here, 'node_modules', font);
  }
  return undefined;
}

const grafanaServer: Plugin = {
  name: 'grafana-server',
  configurePreviewServer(server) {
    server.middlewares.use((request, response, next) => {
      const path = (request.url ?? '/').split('?')[0] ?? '/';
      const json = (value: unknown) => {
        response.setHeader('Content-Type', 'application/json');
        response.statusCode = value === undefined ? 404 : 200;
        response.end(JSON.stringify(value ?? { message: `no ${path}` }));
      };
      if (path === '/api/datasources') {
        return json(dataSources);
      }
      if (path === '/api/search') {
        return json([...readBoards().values()]);
      }
      if (path.startsWith('/api/dashboards/uid/')) {
        return json(readBoards().get(basename(path)));
      }
      const found = file(path);
      if (found) {
        response.setHeader('Content-Type', found.endsWith('.svg') ? 'image/svg+xml' : 'font/woff2');
        createReadStream(found).pipe(response);
        return;
      }
      next();
    });
  },
};

export default defineConfig({
  plugins: [grafanaServer],
  build: {
    target: 'es2022',
    reportCompressedSize: false,
    minify: false,
    chunkSizeWarningLimit: 100_000,
    // Grafana's packages ask each other for names that only some versions have.
    rolldownOptions: { shimMissingExports: true },
  },
  preview: {
    host: '127.0.0.1',
    strictPort: true,
    proxy: { '/prometheus': { target: prometheus, rewrite: (path) => path.replace(/^\/prometheus/, '') } },
  },
});
