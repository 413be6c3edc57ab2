package fleet

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

var errNoChanges = &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "this node does not read the log of decisions"}

// DeviceChanges are the decisions about a device with revisions below one, or the
// newest if that is 0, newest first.
func (s *Service) DeviceChanges(ctx context.Context, id devices.ID, before int64, limit int) ([]devices.Change, error) {
	if s.ports.Changes == nil {
		return nil, errNoChanges
	}
	return s.ports.Changes.DeviceChanges(ctx, id, before, limit)
}

// ChangesSince are the decisions with revisions above one, made at a time or later,
// in order, that the caller may see: a key for some devices sees those of these
// devices. next is the revision after which to go on; 0 at the end. The list may be
// short, or empty, and have more after it.
func (s *Service) ChangesSince(ctx context.Context, by access.By, since time.Time, after int64, limit int) (list []devices.Change, next int64, err error) {
	if s.ports.Changes == nil {
		return nil, 0, errNoChanges
	}
	list, err = s.ports.Changes.ChangesSince(ctx, since, after, limit)
	if err != nil {
		return nil, 0, err
	}
	if len(list) == limit {
		next = list[limit-1].Revision
	}
	if by.Who.Limited() {
		list, err = s.visible(ctx, by, list)
	}
	for i := range list {
		list[i].Value = shown(&list[i])
	}
	return list, next, err
}

// visible are the changes of devices that the caller may see now.
func (s *Service) visible(ctx context.Context, by access.By, list []devices.Change) ([]devices.Change, error) {
	labels := map[devices.ID]map[string]string{}
	if by.Who.NeedsLabels() {
		var ids []devices.ID
		for _, c := range list {
			if c.Device != "" {
				ids = append(ids, c.Device)
			}
		}
		slices.Sort(ids)
		for page := range slices.Chunk(slices.Compact(ids), memoryPage) {
			rows, err := s.ports.Records.Rows(ctx, page)
			if err != nil {
				return nil, err
			}
			for _, row := range rows {
				labels[row.Device.ID] = row.Device.Labels
			}
		}
	}
	return slices.DeleteFunc(list, func(c devices.Change) bool {
		known, found := labels[c.Device]
		return c.Device == "" || by.Who.NeedsLabels() && !found || !by.Who.Devices.MatchIdentity(string(c.Device), known)
	}), nil
}

// shown is the value of a change as callers see it: of an API key what names it, of
// a policy its version. Both are read elsewhere, by those who may.
func shown(c *devices.Change) json.RawMessage {
	var short any
	switch c.Aspect {
	case devices.AspectKey:
		var k struct {
			ID      string    `json:"id"`
			Name    string    `json:"name"`
			Revoked time.Time `json:"revoked,omitzero"`
		}
		if json.Unmarshal(c.Value, &k) == nil {
			short = k
		}
	case devices.AspectPolicy:
		var p struct {
			Version int64 `json:"version"`
		}
		if json.Unmarshal(c.Value, &p) == nil {
			short = p
		}
	default:
		return c.Value
	}
	text, err := json.Marshal(short)
	if err != nil {
		return json.RawMessage("null")
	}
	return text
}
