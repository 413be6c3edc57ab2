package manager

import (
	"context"
	"encoding/json"
	"slices"
	"strings"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/jobs"
	"fleetd/internal/preflight"
	"fleetd/internal/selector"
	"fleetd/internal/timespan"
)

// Limits of a plan.
const (
	shownDevices = 10
	maxRefusals  = 50 // reasons; further ones are left out
)

// Plan reports what a job would do, and creates nothing. Devices are judged by their last
// known tools.
func (m *Manager) Plan(ctx context.Context, p access.Principal, spec api.JobSpec) (api.JobPlan, error) {
	return m.plan(ctx, p, spec, false)
}

// plan is Plan. A job of a group is only for the boards of its image.
func (m *Manager) plan(ctx context.Context, p access.Principal, spec api.JobSpec, ofGroup bool) (api.JobPlan, error) {
	out := api.JobPlan{Refusals: []api.JobRefusal{}, Confirm: []string{}}
	now := m.Store.Now()
	d, err := m.draft(ctx, p, &spec, now, CreateOptions{})
	if err != nil {
		return out, err
	}
	j := jobs.New(spec, p.Owner(), p.Name(), d.selection.String(), now)
	out.Spec, out.NextAt = spec, at(j.NextAt)
	out.Confirm = append(out.Confirm, d.confirm...)
	w := planner{m: m, p: p, spec: &spec, ofGroup: ofGroup, catalogs: map[devices.Hash]*catalog.Catalog{}, index: map[string]int{}, out: &out}
	if err := m.Fleet.Each(ctx, p, d.selection, func(page []devices.View) error { return w.add(ctx, page) }); err != nil {
		return out, err
	}
	out.AtRisk = jobs.AtRisk(&spec, out.Devices)
	if spec.Action.Firmware != nil { // how long it takes, the devices and the stages say
		out.AtRisk = min(out.AtRisk, w.fit)
		return out, nil
	}
	out.Estimated = timespan.Format(estimate(spec.Pace, out.Online))
	return out, nil
}

// planner judges the devices of a plan.
type planner struct {
	m        *Manager
	p        access.Principal
	spec     *api.JobSpec
	catalogs map[devices.Hash]*catalog.Catalog
	index    map[string]int // of out.Refusals, by code and detail
	out      *api.JobPlan
	ofGroup  bool
	fit      int64 // devices that may get the image of a firmware job
}

func (w *planner) add(ctx context.Context, page []devices.View) error {
	if f := w.spec.Action.Firmware; f != nil {
		return w.addImage(ctx, f, page)
	}
	for i := range page {
		v := &page[i]
		if v.State == devices.StatePending {
			continue
		}
		w.out.Devices++
		if v.Presence.Online {
			w.out.Online++
		}
		if no := w.judge(ctx, v); no != nil {
			w.refuse(v.Device.ID, no)
		}
	}
	return ctx.Err()
}

// judge returns why the action would be refused now.
func (w *planner) judge(ctx context.Context, v *devices.View) *devices.Error {
	action, known := jobs.ActionOf(&w.spec.Action)
	if !known { // jobs.Check refuses it
		return nil
	}
	return action.Judge(target{ctx, w, v})
}

// addImage judges devices for an image.
func (w *planner) addImage(ctx context.Context, f *api.JobFirmware, page []devices.View) error {
	page = slices.DeleteFunc(slices.Clone(page), func(v devices.View) bool { return v.State == devices.StatePending })
	list, err := w.m.Firmware.Judge(ctx, f.Image, f.Allow, page)
	for i := range list {
		j, v := &list[i], &page[i]
		if w.ofGroup && j.OtherBoard {
			continue
		}
		w.out.Devices++
		if v.Presence.Online {
			w.out.Online++
		}
		switch {
		case j.Code != "":
			w.refuse(v.Device.ID, devices.Errorf(devices.Code(j.Code), "%s", j.Text))
		case j.Verdict == preflight.Already:
			w.out.Already++
		default:
			w.fit++
			if j.NoWayBack {
				w.out.NoWayBack++
			}
		}
	}
	return err
}

// target implements jobs.Target.
type target struct {
	ctx context.Context
	w   *planner
	v   *devices.View
}

func (t target) Call(name string, arguments json.RawMessage) *devices.Error {
	v, w := t.v, t.w
	if v.CatalogState == devices.CatalogNone {
		return devices.Errorf(devices.CodeToolUnknown, "the device does not speak MCP")
	}
	if v.Presence.Catalog == (devices.Hash{}) {
		return nil
	}
	cat, seen := w.catalogs[v.Presence.Catalog]
	if !seen {
		cat, _ = w.m.Fleet.Catalog(t.ctx, v.Presence.Catalog) // without it the device decides
		w.catalogs[v.Presence.Catalog] = cat
	}
	if cat == nil {
		return nil
	}
	tool := cat.Tool(name)
	if tool == nil {
		if v.Presence.Partial {
			return nil
		}
		return devices.Errorf(devices.CodeToolUnknown, "the device has no tool %q", name)
	}
	by := w.p
	by.Via = access.ViaJob
	q := access.Query{By: by, Device: string(v.Device.ID), Labels: v.Device.Labels, Tool: name, Listed: true, UserOnly: tool.UserOnly}
	if d := w.m.Fleet.Guard().Decide(q); d.Refusal != nil {
		code := devices.CodeForbidden
		if d.Refusal.Tool {
			code = devices.CodeToolDenied
		}
		return devices.Errorf(code, "%s", d.Refusal.Detail)
	}
	return tool.CheckCall(arguments)
}

// Firmware implements jobs.Target: devices are judged a page at a time.
func (t target) Firmware(*api.JobFirmware) *devices.Error { return nil }

func (w *planner) refuse(id devices.ID, no *devices.Error) {
	detail := no.Detail
	if len(no.Faults) > 0 {
		detail = strings.TrimSpace(no.Faults[0].Pointer + " " + no.Faults[0].Detail)
	}
	key := string(no.Code) + " " + detail
	i, seen := w.index[key]
	if !seen {
		if len(w.out.Refusals) >= maxRefusals {
			return
		}
		i = len(w.out.Refusals)
		w.index[key] = i
		w.out.Refusals = append(w.out.Refusals, api.JobRefusal{Code: string(no.Code), Detail: detail, Devices: []string{}})
	}
	r := &w.out.Refusals[i]
	if r.Count++; len(r.Devices) < shownDevices {
		r.Devices = append(r.Devices, string(id))
	}
}

// query returns the list query of a job's selection.
func query(text, after string) (devices.ListQuery, error) {
	sel, err := selector.Parse(text)
	return devices.ListQuery{Select: sel, After: after, Limit: jobs.PrepareBatch, Members: true}, err
}
