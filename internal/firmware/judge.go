package firmware

import (
	"context"
	"os"

	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/preflight"
)

// Judge judges devices for an image, by what they said at their last checks. allow are codes of findings that do not block.
func (m *Manager) Judge(ctx context.Context, image string, allow []string, views []devices.View) ([]preflight.Judgment, error) {
	c, err := m.checker(ctx, Target{Image: image})
	if err != nil {
		return nil, err
	}
	c.allow = allow
	verdicts, err := c.judgeAll(ctx, views)
	if err != nil {
		return nil, err
	}
	out := make([]preflight.Judgment, len(verdicts))
	for i := range verdicts {
		out[i] = judgmentOf(&verdicts[i])
	}
	return out, nil
}

func judgmentOf(v *api.FirmwareVerdict) preflight.Judgment {
	j := preflight.Judgment{Verdict: preflight.Verdict(v.Verdict)}
	for _, f := range v.Findings {
		j.OtherBoard = j.OtherBoard || f.Code == string(preflight.Board)
		switch {
		case f.Severity == string(preflight.Blocks) && j.Code == "":
			j.Code, j.Text = f.Code, f.Text
		case f.Code == string(preflight.NoWayBack) || f.Code == string(preflight.ImageUnknown):
			j.NoWayBack = true
		}
	}
	return j
}

// JudgeCheck judges a device that is at a check, or has been at one, for an image. v and details have what the device says there; empty
// details stand for those of the last check that was recorded. seen is whether an earlier check showed the image that it runs.
func (m *Manager) JudgeCheck(ctx context.Context, image string, allow []string, v *devices.View, details string, seen func(newest devices.DeviceImage) bool) (preflight.Offer, error) {
	c, err := m.checker(ctx, Target{Image: image})
	if err != nil {
		return preflight.Offer{}, err
	}
	ids := []devices.ID{v.Device.ID}
	newest, err := m.Store.Newest(ctx, ids)
	if err == nil {
		c.bars, err = m.Bars(ctx, ids)
	}
	if err != nil {
		return preflight.Offer{}, err
	}
	c.allow = allow
	last := newest[v.Device.ID]
	now := last
	if details != "" {
		now.Details = details
	}
	now.SeenTwice = seen(last)
	verdict := c.judge(v, now)
	d, x := c.device(v, now), c.images[0]
	return preflight.Offer{Judgment: judgmentOf(&verdict), Ref: preflight.Ref{ID: verdict.Image, ELF: x.ELF}, Version: preflight.Offered(x), Force: preflight.NeedsForce(&d, x), Foreign: preflight.IsForeign(x, m.Server),
		Single: preflight.IsOld(&d), Size: x.Size, Details: last.Details}, nil
}

// Resolve returns a stored image by its SHA-256, or the beginning of it.
func (m *Manager) Resolve(ctx context.Context, id string) (preflight.Ref, error) {
	image, _, err := m.find(ctx, id)
	return image.ref(), err
}

func (i *Image) ref() preflight.Ref { return preflight.Ref{ID: i.ID(), ELF: i.ELFText()} }

// ByELF returns the stored image of a build; devices.ErrNotFound if there is none.
func (m *Manager) ByELF(ctx context.Context, elf string) (preflight.Ref, error) {
	all, err := m.Store.Images(ctx)
	for i := range all {
		if all[i].ELFText() == elf {
			return all[i].ref(), nil
		}
	}
	if err == nil {
		err = devices.ErrNotFound
	}
	return preflight.Ref{}, err
}

// Release returns the images of a release. Two of them for one board are a conflict.
func (m *Manager) Release(ctx context.Context, name string) (list []preflight.Ref, err error) {
	all, err := m.Store.Images(ctx)
	if err != nil {
		return nil, err
	}
	of, err := release(all, name)
	if err != nil {
		return nil, err
	}
	first := map[string]*Image{}
	for i := range of {
		for _, board := range of[i].judged().BoardsOf() {
			if other := first[board]; other != nil && other != &of[i] {
				return nil, devices.Errorf(devices.CodeConflict, "the release has two images for the board %s: %s and %s; delete one, or roll out one of them by its id", board, other.ID()[:Digits], of[i].ID()[:Digits])
			}
			first[board] = &of[i]
		}
		list = append(list, of[i].ref())
	}
	return list, nil
}

// File opens the bytes of an image on this node; what it lacks is fetched first.
func (m *Manager) File(ctx context.Context, id string) (*os.File, error) {
	return m.files.open(ctx, id)
}
