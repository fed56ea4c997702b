/** The page: the board whose uid is in the path, with Grafana's theme, location service and URL synchronisation. */
import { ThemeContext, createTheme, locationUtil } from '@grafana/data';
import { config, locationService, LocationServiceProvider } from '@grafana/runtime';
import { type EmbeddedScene, UrlSyncContextProvider } from '@grafana/scenes';
import { GlobalStyles, PortalContainer } from '@grafana/ui';
import { StrictMode, useEffect, useState } from 'react';
import { createRoot } from 'react-dom/client';
import { Router } from 'react-router-dom';
import 'react-grid-layout/css/styles.css';
import 'react-resizable/css/styles.css';

import { type BoardModel, buildScene } from './board';
import { panelStates } from './probe';
import { registerAll } from './registries';
import { allUnsupported } from './unsupported';

function useLocation() {
  const [location, setLocation] = useState(locationService.getLocation());
  useEffect(() => locationService.getHistory().listen(setLocation), []);
  return location;
}

function useScene(uid: string | undefined): { scene?: EmbeddedScene; title: string } {
  const [shown, setShown] = useState<{ uid?: string; scene?: EmbeddedScene; title: string }>({ title: 'Loading' });
  useEffect(() => {
    void (async () => {
      const answer = await fetch(`/api/dashboards/uid/${uid}`);
      const board = (await answer.json()) as BoardModel;
      if (!answer.ok) {
        setShown({ uid, title: `No board ${uid}` });
        return;
      }
      const scene = buildScene(board);
      window.__grafanaSceneContext = scene;
      window.panelStates = () => panelStates(scene);
      document.title = board.title;
      setShown({ uid, scene, title: board.title });
    })();
  }, [uid]);
  // The scene of the last board must not read the URL of the next.
  return shown.uid === uid ? shown : { title: 'Loading' };
}

function Page() {
  const location = useLocation();
  const uid = /^\/d\/([^/]+)/.exec(location.pathname)?.[1];
  const { scene, title } = useScene(uid);
  const missing = allUnsupported();
  return (
    <Router location={location as never} navigator={locationService.getHistory() as never}>
      <main style={{ padding: '8px 16px', minHeight: '100vh', display: 'flex', flexDirection: 'column' }}>
        <h1 style={{ fontSize: 20, margin: '0 0 8px' }}>{title}</h1>
        {missing.length > 0 && <pre data-unsupported>{missing.join('\n')}</pre>}
        {scene && (
          <UrlSyncContextProvider key={uid} scene={scene} updateUrlOnInit createBrowserHistorySteps>
            <scene.Component model={scene} />
          </UrlSyncContextProvider>
        )}
      </main>
      <PortalContainer />
    </Router>
  );
}

/** Grafana handles clicks on links within itself without loading the page. */
function interceptLinkClicks(event: MouseEvent): void {
  const anchor = (event.target as Element).closest('a');
  const plain = event.button === 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey;
  const href = anchor?.getAttribute('href');
  if (!anchor || !href || !plain || anchor.target === '_blank' || !href.startsWith('/d/')) {
    return;
  }
  event.preventDefault();
  locationService.push(locationUtil.stripBaseFromUrl(href));
}

async function start(): Promise<void> {
  const mode = new URLSearchParams(window.location.search).get('theme') === 'light' ? 'light' : 'dark';
  const theme = createTheme({ name: mode, colors: { mode } });
  config.theme2 = theme;
  await registerAll();
  document.addEventListener('click', interceptLinkClicks);
  const root = document.getElementById('root');
  if (!root) {
    throw new Error('no root element');
  }
  createRoot(root).render(
    <StrictMode>
      <ThemeContext.Provider value={theme}>
        <LocationServiceProvider service={locationService}>
          <GlobalStyles />
          <Page />
        </LocationServiceProvider>
      </ThemeContext.Provider>
    </StrictMode>,
  );
}

void start();
