package fleet

import (
	"context"
	"maps"
	"slices"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devices/registry"
	"fleetd/internal/selector"
)

// Edit is what an operator may write on a device; nil leaves a field alone.
type Edit struct {
	Name   *string
	Labels *map[string]string // replaces all
	Merge  map[string]*string // labels to set; nil removes one
	Prefer *devices.Transport
}

// Bounds of what operators write on a device.
const (
	MaxName       = 128 // bytes
	MaxLabels     = 64
	MaxLabelKey   = 63  // bytes
	MaxLabelValue = 256 // bytes
)

// Check tells what of an edit is not allowed on any device.
func (e *Edit) Check() error {
	if e.Name != nil && len(*e.Name) > MaxName {
		return devices.Errorf(devices.CodeBadRequest, "name has %d bytes, at most %d are allowed", len(*e.Name), MaxName)
	}
	if e.Labels != nil {
		for key, value := range *e.Labels {
			if err := CheckLabel(key, value); err != nil {
				return err
			}
		}
	}
	for key, value := range e.Merge {
		text := ""
		if value != nil {
			text = *value
		}
		if err := CheckLabel(key, text); err != nil {
			return err
		}
	}
	return nil
}

// CheckLabel tells what is wrong with a label.
func CheckLabel(key, value string) error {
	if key == "" || devices.SubjectTokens(key) != key || len(key) > MaxLabelKey || len(value) > MaxLabelValue {
		return devices.Errorf(devices.CodeBadRequest, "label %q: keys are 1 to %d of [A-Za-z0-9_-], values at most %d bytes", key, MaxLabelKey, MaxLabelValue)
	}
	return nil
}

// apply makes the edit.
func (e *Edit) apply(m *devices.Member) error {
	if e.Name != nil {
		m.Name = *e.Name
	}
	if e.Labels != nil {
		m.Labels = maps.Clone(*e.Labels)
	}
	for key, value := range e.Merge {
		switch {
		case value == nil:
			delete(m.Labels, key)
		case m.Labels == nil:
			m.Labels = map[string]string{key: *value}
		default:
			m.Labels[key] = *value
		}
	}
	if len(m.Labels) > MaxLabels {
		return devices.Errorf(devices.CodeBadRequest, "%s would have %d labels, at most %d are allowed", m.ID, len(m.Labels), MaxLabels)
	}
	if e.Prefer != nil {
		m.Prefer = *e.Prefer
	}
	return nil
}

// Edit changes a device's name, labels or preferred transport. ifMatch is the
// revision of the device that the operator has seen; 0: whatever it is.
func (s *Service) Edit(ctx context.Context, by access.By, id devices.ID, ifMatch int64, edit Edit) error {
	if err := edit.Check(); err != nil {
		return err
	}
	permits := admission.Permit(by, id)
	_, err := s.registry.Edit(ctx, by.Key(), id, ifMatch, func(m *devices.Member) error {
		if err := permits(m); err != nil {
			return err
		}
		return edit.apply(m)
	})
	return err
}

// editPage is how many devices EditAll decides about at a time: other decisions
// wait that long.
const editPage = 200

// EditAll makes an edit of all devices that the selector selects and the caller
// may change, and counts those that match and those that changed. It counts also
// with an error.
func (s *Service) EditAll(ctx context.Context, by access.By, sel selector.Selector, edit Edit) (matched, changed int, err error) {
	if err := edit.Check(); err != nil {
		return 0, 0, err
	}
	l := s.lister(ctx, devices.ListQuery{Select: sel})
	err = s.Each(ctx, by, sel, func(page []devices.View) error {
		for list := range slices.Chunk(page, editPage) {
			decisions := make([]devices.Decision, len(list))
			now := time.Now()
			for i, v := range list {
				id, selectable := v.Device.ID, selectable(&v, l.catalog)
				permits := admission.Permit(by, id)
				decisions[i] = devices.Decision{Device: id, Who: by.Key(), Decide: func(m *devices.Member) error {
					is := selectable
					is.Name, is.Labels = m.Name, m.Labels // as they are now; the rest nobody decides
					switch {
					case !m.Known():
						return registry.Unknown(id)
					case !sel.Match(&is, now):
						return devices.Errorf(devices.CodeChanged, "%s is not selected any more", id)
					}
					if err := permits(m); err != nil {
						return err
					}
					return edit.apply(m)
				}}
			}
			outcomes, err := s.registry.Decide(ctx, decisions)
			if err != nil {
				return err
			}
			for _, o := range outcomes {
				if o.Err == nil {
					matched++
				}
				if len(o.Changes) > 0 {
					changed++
				}
			}
		}
		return nil
	})
	return matched, changed, err
}
