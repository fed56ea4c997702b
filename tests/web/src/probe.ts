/** What a test asks the page about its panels: whether they are done, how many rows came, what went wrong. */
import { type DataFrame, LoadingState } from '@grafana/data';
import { type EmbeddedScene, SceneQueryRunner, VizPanel, sceneGraph } from '@grafana/scenes';

import { isDrawn } from './panels';

export interface PanelState {
  key: string;
  type: string;
  /** Whether Grafana's own components draw it. */
  drawn: boolean;
  title: string;
  done: boolean;
  /** Rows that the queries gave, before transformations. */
  rows: number;
  error: string;
  /** Columns by name of each frame, for a panel that is not drawn: what its drawing would look for. */
  frames: Array<Record<string, unknown[]>>;
}

export function panelStates(scene: EmbeddedScene | undefined): PanelState[] {
  const panels = scene ? sceneGraph.findAllObjects(scene, (item) => item instanceof VizPanel) : [];
  return panels.map((item) => {
    const panel = item as VizPanel;
    const runner = sceneGraph.findDescendents(panel, SceneQueryRunner)[0];
    const data = runner?.state.data;
    const failed = data?.errors?.[0]?.message ?? panel.state._pluginLoadError ?? '';
    return {
      key: panel.state.key ?? '',
      type: panel.state.pluginId,
      drawn: isDrawn(panel.state.pluginId),
      title: sceneGraph.interpolate(panel, panel.state.title, undefined, 'text'),
      done: !runner || data?.state === LoadingState.Done || data?.state === LoadingState.Error,
      rows: data?.series.reduce((sum, frame) => sum + frame.length, 0) ?? 0,
      error: failed,
      frames: isDrawn(panel.state.pluginId) ? [] : transformed(panel).map(columns),
    };
  });
}

function transformed(panel: VizPanel): DataFrame[] {
  return sceneGraph.getData(panel).state.data?.series ?? [];
}

function columns({ fields }: DataFrame): Record<string, unknown[]> {
  return Object.fromEntries(fields.map(({ name, values }) => [name, values]));
}

declare global {
  interface Window {
    panelStates: () => PanelState[];
  }
}
