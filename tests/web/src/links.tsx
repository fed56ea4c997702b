/** Links of boards and panels, resolved as Grafana's link service does. */
import { type DataLink, locationUtil } from '@grafana/data';
import {
  type SceneComponentProps,
  type SceneObject,
  SceneObjectBase,
  type SceneObjectState,
  sceneGraph,
} from '@grafana/scenes';
import { ToolbarButton, Dropdown, Icon, Menu } from '@grafana/ui';
import { useEffect, useState } from 'react';

import type { BoardModel, LinkModel } from './board';

interface LinksState<T> extends SceneObjectState {
  links: T[];
}

export class BoardLinks extends SceneObjectBase<LinksState<LinkModel>> {
  static Component = BoardLinksComponent;
}

export class PanelLinks extends SceneObjectBase<LinksState<DataLink>> {
  static Component = PanelLinksComponent;
}

interface Target {
  title: string;
  url: string;
  blank: boolean;
}

function resolve(scene: SceneObject, url: string, { keepTime, includeVars }: Partial<LinkModel>): string {
  const parts = [...(keepTime ? ['${__url_time_range}'] : []), ...(includeVars ? ['${__all_variables}'] : [])];
  const full = parts.length ? `${url}${url.includes('?') ? '&' : '?'}${parts.join('&')}` : url;
  return locationUtil.processUrl(locationUtil.assureBaseUrl(sceneGraph.interpolate(scene, full)));
}

/** A change of a variable or of the time range changes where the links go. */
function useSceneChanges(scene: SceneObject): void {
  const { value } = sceneGraph.getTimeRange(scene).useState();
  const [, render] = useState(0);
  void value;
  useEffect(() => {
    const variables = sceneGraph.getVariables(scene).state.variables;
    const subscriptions = variables.map((variable) => variable.subscribeToState(() => render((count) => count + 1)));
    return () => subscriptions.forEach((subscription) => subscription.unsubscribe());
  }, [scene]);
}

function BoardLinksComponent({ model }: SceneComponentProps<BoardLinks>) {
  const { links } = model.useState();
  const [boards, setBoards] = useState<BoardModel[]>([]);
  useSceneChanges(model);
  useEffect(() => {
    void fetch('/api/search')
      .then((answer) => answer.json())
      .then(setBoards);
  }, []);
  return (
    <>
      {links.map((link, index) => {
        if (link.type !== 'dashboards') {
          const target = { title: link.title, url: resolve(model, link.url, link), blank: Boolean(link.targetBlank) };
          return <Anchor key={index} {...target} />;
        }
        const targets = boards
          .filter(({ tags }) => (link.tags ?? []).every((tag) => tags.includes(tag)))
          .map(({ uid, title }) => ({
            title,
            url: resolve(model, `/d/${uid}`, link),
            blank: Boolean(link.targetBlank),
          }));
        return link.asDropdown ? (
          <Dropdown key={index} overlay={<LinkMenu targets={targets} />}>
            <ToolbarButton icon="bars" variant="canvas">
              {link.title}
            </ToolbarButton>
          </Dropdown>
        ) : (
          targets.map((target) => <Anchor key={target.url} {...target} />)
        );
      })}
    </>
  );
}

function LinkMenu({ targets }: { targets: Target[] }) {
  return (
    <Menu>
      {targets.map(({ title, url, blank }) => (
        <Menu.Item key={url} label={title} url={url} target={blank ? '_blank' : undefined} />
      ))}
    </Menu>
  );
}

function Anchor({ title, url, blank }: Target) {
  return (
    <a href={url} target={blank ? '_blank' : undefined} data-board-link={title} style={{ alignSelf: 'center' }}>
      <Icon name="apps" size="sm" /> {title}
    </a>
  );
}

function PanelLinksComponent({ model }: SceneComponentProps<PanelLinks>) {
  const { links } = model.useState();
  useSceneChanges(model);
  return (
    <span style={{ display: 'inline-flex', gap: 8, padding: '0 8px', fontWeight: 'normal' }}>
      {links.map(({ title, url, targetBlank }) => (
        <a key={url} href={resolve(model, url, {})} target={targetBlank ? '_blank' : undefined} data-panel-link={title}>
          <Icon name="external-link-alt" size="sm" /> {title}
        </a>
      ))}
    </span>
  );
}
