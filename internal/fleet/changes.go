package fleet

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

var errNoChanges = &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "this node has no access to the log of changes"}

// DeviceChanges returns the changes of a device with revisions below before, newest
// first; 0 starts with the newest.
func (s *Service) DeviceChanges(ctx context.Context, id devices.ID, before int64, limit int) ([]devices.Change, error) {
	if s.ports.Changes == nil {
		return nil, errNoChanges
	}
	list, err := s.ports.Changes.DeviceChanges(ctx, id, before, limit)
	for i := range list {
		list[i].Value = s.publicValue(&list[i], false)
	}
	return list, err
}

// ChangesSince returns the changes with revisions above after, made at since or
// later, in order of revision. A key that is limited to devices gets the changes of
// these devices. next is the revision to continue after, 0 at the end. The list may
// be short or empty although more follows.
func (s *Service) ChangesSince(ctx context.Context, principal access.Principal, since time.Time, after int64, limit int) (list []devices.Change, next int64, err error) {
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
	if principal.Caller.Limited() {
		list, err = s.visible(ctx, principal, list)
	}
	for i := range list {
		list[i].Value = s.publicValue(&list[i], principal.Caller.Scopes.Has(access.ScopeAdmin))
	}
	return list, next, err
}

// visible returns the changes of devices that the caller may see now.
func (s *Service) visible(ctx context.Context, principal access.Principal, list []devices.Change) ([]devices.Change, error) {
	labels := map[devices.ID]map[string]string{}
	if principal.Caller.NeedsLabels() {
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
		return c.Device == "" || principal.Caller.NeedsLabels() && !found || !principal.Caller.Devices.MatchIdentity(string(c.Device), known)
	}), nil
}

// publicValue returns the value of a change for callers: of an API key its id, and for administrators its name, of a
// policy its version, of clients their hashes. Authorized callers read the rest elsewhere.
func (s *Service) publicValue(c *devices.Change, admin bool) json.RawMessage {
	var short any
	switch c.Aspect {
	case devices.AspectClient:
		var clientID string
		if json.Unmarshal(c.Value, &clientID) == nil {
			short = s.Client(clientID)
		}
	case devices.AspectRefused:
		short = s.publicClients(c.Value)
	case devices.AspectJoin, devices.AspectImport:
		var members map[string]json.RawMessage
		if json.Unmarshal(c.Value, &members) != nil {
			break
		}
		shown := map[string]any{}
		for name, value := range members {
			var clientID string
			switch {
			case name == "client_id" && json.Unmarshal(value, &clientID) == nil:
				shown["client"] = s.Client(clientID)
			case name == "refused":
				shown[name] = s.publicClients(value)
			case name != "client_id":
				shown[name] = value
			}
		}
		short = shown
	case devices.AspectKey:
		var k struct {
			ID      string    `json:"id"`
			Name    string    `json:"name,omitempty"`
			Revoked time.Time `json:"revoked,omitzero"`
		}
		if json.Unmarshal(c.Value, &k) == nil {
			if !admin {
				k.Name = ""
			}
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

// publicClients returns the hashes of devices.Refused.
func (s *Service) publicClients(value json.RawMessage) []string {
	var refused devices.Refused
	_ = json.Unmarshal(value, &refused) // what cannot be read is not shown
	list := refused.List()
	for i := range list {
		list[i] = s.Client(list[i])
	}
	return list
}
