package fleet

import (
	"cmp"
	"context"
	"slices"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devices/registry"
	"fleetd/internal/selector"
)

// Edit is an operator's edit of a device; nil fields stay as they are.
type Edit struct {
	Name   *string
	Labels map[string]*string // to set; nil removes one
	Prefer *devices.Transport
}

// Limits of the values that operators write.
const (
	MaxName       = 128 // bytes
	MaxLabels     = 64
	MaxLabelKey   = 63  // bytes
	MaxLabelValue = 256 // bytes
)

// Check returns an error if the edit is not valid for any device.
func (e *Edit) Check() error {
	if e.Name != nil && len(*e.Name) > MaxName {
		return devices.Errorf(devices.CodeBadRequest, "name has %d bytes, at most %d are allowed", len(*e.Name), MaxName)
	}
	for key, value := range e.Labels {
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

// CheckLabel returns an error if a label is not valid.
func CheckLabel(key, value string) error {
	if key == "" || devices.SubjectTokens(key) != key || len(key) > MaxLabelKey || len(value) > MaxLabelValue {
		return devices.Errorf(devices.CodeBadRequest, "label %q: a key has 1 to %d characters of [A-Za-z0-9_-], a value at most %d bytes", key, MaxLabelKey, MaxLabelValue)
	}
	return nil
}

// apply applies the edit to a member.
func (e *Edit) apply(m *devices.Member) error {
	if e.Name != nil {
		m.Name = *e.Name
	}
	for key, value := range e.Labels {
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
// revision that the device must have; 0 accepts any.
func (s *Service) Edit(ctx context.Context, principal access.Principal, id devices.ID, ifMatch int64, edit Edit) error {
	if err := edit.Check(); err != nil {
		return err
	}
	permits := admission.Permit(principal, id)
	_, err := s.registry.Edit(ctx, principal.Key(), id, ifMatch, func(m *devices.Member) error {
		if err := permits(m); err != nil {
			return err
		}
		return edit.apply(m)
	})
	return err
}

// editPage is how many devices EditAll decides about in one transaction, for which
// other decisions wait.
const editPage = 200

// EditAll applies an edit to all devices that the selector matches and the caller may
// change. It returns how many match and how many changed, also with an error. A device that the edit
// does not fit stops it for no other; the error is about the first of them.
func (s *Service) EditAll(ctx context.Context, principal access.Principal, sel selector.Selector, edit Edit) (matched, changed int, err error) {
	if err := edit.Check(); err != nil {
		return 0, 0, err
	}
	l := s.lister(ctx, devices.ListQuery{Select: sel})
	var unfit error
	err = s.Each(ctx, principal, sel, func(page []devices.View) error {
		for list := range slices.Chunk(page, editPage) {
			decisions := make([]devices.Decision, len(list))
			now := clock.Now()
			for i, v := range list {
				id, selectable := v.Device.ID, selectable(&v, l.catalog)
				permits := admission.Permit(principal, id)
				decisions[i] = devices.Decision{Device: id, Who: principal.Key(), Decide: func(m *devices.Member) error {
					status := selectable
					status.Name, status.Labels = m.Name, m.Labels // name and labels as the database has them now; no decision changes the rest
					switch {
					case !m.Known():
						return registry.UnknownDevice(id)
					case !sel.Match(&status, now):
						return devices.Errorf(devices.CodeStale, "%s no longer matches the selector", id)
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
				switch {
				case o.Err == nil:
					matched++
				case devices.AsError(o.Err).Code == devices.CodeBadRequest:
					matched++
					unfit = cmp.Or(unfit, o.Err)
				}
				if len(o.Changes) > 0 {
					changed++
				}
			}
		}
		return nil
	})
	return matched, changed, cmp.Or(err, unfit)
}
