package firmware

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/espimage"
	"fleetd/internal/preflight"
	"fleetd/internal/selector"
)

// Target is what devices could get: one image, or the images of a release. Exactly one member is set.
type Target struct{ Image, Release string }

// checker judges devices for a target.
type checker struct {
	m       *Manager
	images  []*preflight.Image          // of the target
	ids     map[string]string           // of all images, by ELF
	stored  map[string]*preflight.Image // all images, by ELF
	details map[string]devices.Details  // that were read, by their text: many devices have the same
	bars    map[devices.ID]string       // of the devices that are judged
	allow   []string                    // findings that do not block
}

// checker returns that of a target.
func (m *Manager) checker(ctx context.Context, t Target) (*checker, error) {
	var of, all []Image
	var err error
	switch {
	case (t.Image == "") == (t.Release == ""):
		err = devices.Errorf(devices.CodeBadRequest, "image: give either image or release")
	case t.Image != "":
		of = make([]Image, 1)
		of[0], all, err = m.find(ctx, t.Image)
	default:
		if all, err = m.Store.Images(ctx); err == nil {
			of, err = release(all, t.Release)
		}
	}
	if err != nil {
		return nil, err
	}
	c := newChecker(m, all)
	for i := range of {
		c.images = append(c.images, of[i].judged())
	}
	return c, nil
}

func newChecker(m *Manager, all []Image) *checker {
	c := &checker{m: m, ids: map[string]string{}, stored: map[string]*preflight.Image{}, details: map[string]devices.Details{}}
	for i := range all {
		if elf := all[i].ELFText(); c.ids[elf] == "" { // of several of one build, that which was added last
			c.ids[elf], c.stored[elf] = all[i].ID(), all[i].judged()
		}
	}
	return c
}

// release returns the images of project@version, or of a version that one project has.
func release(all []Image, name string) (of []Image, err error) {
	var projects []string
	for i := range all {
		if full := all[i].Project + "@" + all[i].Version; name == full || name == all[i].Version {
			of = append(of, all[i])
			projects = append(projects, full)
		}
	}
	slices.Sort(projects)
	switch projects = slices.Compact(projects); {
	case len(of) == 0:
		return nil, devices.Errorf(devices.CodeNotFound, "no firmware image of the release %s is stored; GET /v1/firmware lists them", name)
	case len(projects) > 1:
		return nil, devices.Errorf(devices.CodeBadRequest, "release: several projects have the version; give one of %s", strings.Join(projects, ", "))
	}
	return of, nil
}

// judge returns what a device could get of the target: of several images that are for its board, the one that suits best.
func (c *checker) judge(v *devices.View, newest devices.DeviceImage) api.FirmwareVerdict {
	d := c.device(v, newest)
	out := api.FirmwareVerdict{Device: string(v.Device.ID), Board: v.Device.Board, Firmware: v.Device.Firmware, Findings: []api.FirmwareFinding{}}
	of := c.images
	if len(of) > 1 {
		of = slices.DeleteFunc(slices.Clone(of), func(x *preflight.Image) bool { return !slices.Contains(x.BoardsOf(), d.Board) })
	}
	if len(of) == 0 {
		out.Verdict = string(preflight.Blocked)
		out.Findings = append(out.Findings, api.FirmwareFinding{Code: string(preflight.Board), Severity: string(preflight.Blocks), Text: fmt.Sprintf("No image of the release is for the board %q. Add the one that is.", d.Board)})
		return out
	}
	best := -1
	for _, x := range of {
		verdict, findings := preflight.Judge(&d, x, c.m.Server, c.allow...)
		rank := slices.Index([]preflight.Verdict{preflight.Blocked, preflight.Waiting, preflight.Fit, preflight.Already}, verdict)
		if rank <= best {
			continue
		}
		best = rank
		out.Verdict, out.Image, out.Findings = string(verdict), hex.EncodeToString(x.SHA256[:]), []api.FirmwareFinding{}
		for _, f := range findings {
			out.Findings = append(out.Findings, api.FirmwareFinding{Code: string(f.Code), Severity: string(f.Severity), Allow: f.Allow, Text: f.Text})
		}
	}
	return out
}

// device returns what is known of a device. What it said at its last check is in newest.
func (c *checker) device(v *devices.View, newest devices.DeviceImage) preflight.Device {
	d := preflight.Device{Admitted: v.Device.Admission == devices.AdmissionMember && v.State != devices.StateContested, SeenTwice: newest.SeenTwice,
		Board: v.Device.Board, Version: v.Device.Firmware, ELF: v.Device.ELF, Chip: v.Device.Chip, Running: c.stored[v.Device.ELF], Bar: c.bars[v.Device.ID]}
	details := c.read(newest.Details)
	if details.Unreadable || details.FlashSize == 0 || len(details.Table) == 0 { // every firmware says these
		return d
	}
	d.Readable, d.Revision, d.FlashSize, d.Project, d.Slot, d.Table = true, details.Chip.Revision, details.FlashSize, details.Application.Project, details.OTA.Label, tableOf(&details)
	return d
}

func (c *checker) read(text string) devices.Details {
	details, known := c.details[text]
	if !known {
		details = devices.ParseDetails(text)
		c.details[text] = details
	}
	return details
}

func tableOf(d *devices.Details) (table []espimage.Partition) {
	for _, p := range d.Table {
		table = append(table, espimage.Partition{Label: p.Label, Type: p.Type, Subtype: p.Subtype, Offset: p.Address, Size: p.Size})
	}
	return table
}

func (c *checker) judgeAll(ctx context.Context, views []devices.View) ([]api.FirmwareVerdict, error) {
	ids := make([]devices.ID, len(views))
	for i := range views {
		ids[i] = views[i].Device.ID
	}
	newest, err := c.m.Store.Newest(ctx, ids)
	if err != nil {
		return nil, err
	}
	if c.bars, err = c.m.Bars(ctx, ids); err != nil {
		return nil, err
	}
	out := make([]api.FirmwareVerdict, len(views))
	for i := range views {
		out[i] = c.judge(&views[i], newest[ids[i]])
	}
	return out, nil
}

// Count counts the devices of a selection, of those that the caller may see, by what a check says of them.
func (m *Manager) Count(ctx context.Context, by access.Principal, t Target, sel selector.Selector) (*api.FirmwareCounts, error) {
	c, err := m.checker(ctx, t)
	if err != nil {
		return nil, err
	}
	counts := &api.FirmwareCounts{Verdicts: map[string]int64{}, Findings: map[string]int64{}}
	for _, verdict := range preflight.Verdicts {
		counts.Verdicts[string(verdict)] = 0
	}
	return counts, m.Fleet.Each(ctx, by, sel, func(page []devices.View) error {
		verdicts, err := c.judgeAll(ctx, page)
		for i := range verdicts {
			counts.Devices++
			counts.Verdicts[verdicts[i].Verdict]++
			for _, f := range verdicts[i].Findings {
				counts.Findings[f.Code]++
			}
		}
		return err
	})
}

// Check returns a page of devices of a selection, of those that the caller may see, with what a check says of each; after and next
// are as of a list of devices.
func (m *Manager) Check(ctx context.Context, by access.Principal, t Target, sel selector.Selector, after string, limit int) (items []api.FirmwareVerdict, next string, err error) {
	c, err := m.checker(ctx, t)
	if err != nil {
		return nil, "", err
	}
	views, next, err := m.Fleet.List(ctx, devices.ListQuery{Select: selector.And(by.Caller.Devices, sel), After: after, Limit: limit, Members: by.Caller.NeedsLabels()})
	if err == nil {
		items, err = c.judgeAll(ctx, views)
	}
	return items, next, err
}

// OfDevice returns what a device runs, and whether it could get an image, unless that is empty.
func (m *Manager) OfDevice(ctx context.Context, id devices.ID, image string) (api.DeviceFirmware, error) {
	v, err := m.Fleet.Get(ctx, id)
	if err != nil {
		return api.DeviceFirmware{}, err
	}
	if list, err := m.Fleet.Views(ctx, []devices.ID{id}); err == nil && len(list) > 0 {
		v = list[0] // with its row, which another node may have written since the device connected
	}
	history, err := m.Store.History(ctx, id)
	if err != nil {
		return api.DeviceFirmware{}, err
	}
	var c *checker
	if image != "" {
		c, err = m.checker(ctx, Target{Image: image})
	} else {
		var all []Image
		all, err = m.Store.Images(ctx)
		c = newChecker(m, all)
	}
	if err != nil {
		return api.DeviceFirmware{}, err
	}
	out := api.DeviceFirmware{Device: string(id), Board: v.Device.Board, Firmware: v.Device.Firmware, ELF: v.Device.ELF, Image: c.ids[v.Device.ELF], History: []api.DeviceImage{}}
	for _, h := range history {
		out.History = append(out.History, api.DeviceImage{ELF: h.ELF, Image: c.ids[h.ELF], Version: h.Version, Board: h.Board, Cause: string(h.Cause), At: api.At(h.At)})
	}
	var newest devices.DeviceImage
	if len(history) > 0 {
		newest = history[0]
	}
	if d := c.device(&v, newest); d.Readable {
		details := c.read(newest.Details)
		out.Facts = &api.DeviceFacts{Project: d.Project, CompileTime: details.Application.CompileTime, IDFVersion: details.Application.IDF, ChipRevision: espimage.Revision(d.Revision),
			FlashSize: d.FlashSize, Slot: d.Slot, Layout: append([]api.Partition{}, layoutView(d.Table)...)}
		if details.Display.Width > 0 {
			out.Facts.Display = fmt.Sprintf("%dx%d", details.Display.Width, details.Display.Height)
		}
	}
	if c.bars, err = m.Bars(ctx, []devices.ID{id}); err != nil {
		return api.DeviceFirmware{}, err
	}
	out.Bar = c.bars[id]
	if image != "" {
		verdict := c.judge(&v, newest)
		out.Check = &verdict
	}
	return out, nil
}
