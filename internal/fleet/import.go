package fleet

import (
	"context"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
)

// MaxImport is how many rows one Import accepts.
const MaxImport = 1000

// ImportRow is what an import writes to one device; nil fields stay as they are.
type ImportRow struct {
	Device   devices.ID
	ClientID *string // empty: no client is admitted yet; the first one will be
	Name     *string
	Prefer   *devices.Transport
	Serial   *string
	Labels   map[string]*string // to set; nil removes a label
}

// ImportResult is the outcome of one row.
type ImportResult struct {
	Err     error // why the row was refused; then nothing changed
	Created bool
	Changed bool // an existing device changed
	// FirstClient reports that the device is a member without a client: the first that
	// connects is admitted.
	FirstClient bool
}

// CheckImport returns the results that Import would have, without changing anything.
// created is how many devices earlier rows of the file create. With an error there are
// no results.
func (s *Service) CheckImport(ctx context.Context, principal access.Principal, rows []ImportRow, replace bool, created int64) ([]ImportResult, error) {
	if err := s.registry.CheckReady(); err != nil {
		return nil, err
	}
	var known []devices.ID
	for _, row := range rows {
		if s.registry.Status(row.Device, "").Known {
			known = append(known, row.Device)
		}
	}
	members := make(map[devices.ID]devices.Member, len(known))
	if len(known) > 0 {
		found, err := s.ports.Records.Rows(ctx, known)
		if err != nil {
			return nil, err
		}
		for _, row := range found {
			members[row.Device.ID] = row.Device.Member()
		}
	}
	out := make([]ImportResult, len(rows))
	rotation := s.registry.Rotation()
	for i, d := range s.importDecisions(principal, rows, replace, created) {
		before, ok := members[d.Device]
		if !ok {
			before = devices.Member{ID: d.Device}
		}
		after := before.Clone()
		if err := d.Make(&after, rotation); err != nil {
			out[i].Err = err
			continue
		}
		out[i] = imported(&before, &after, len(devices.ChangesOf(&before, &after, true)) > 0)
	}
	return out, nil
}

// Import writes at most MaxImport rows, each of another device, in one transaction. An
// unknown device becomes a member. replace allows a row to replace the client of a
// member, and to admit a revoked device. committed is called after the commit: the
// caller may import the next rows. With an error, rows may have been written or not.
func (s *Service) Import(ctx context.Context, principal access.Principal, rows []ImportRow, replace bool, committed func()) ([]ImportResult, error) {
	if err := s.registry.CheckReady(); err != nil {
		return nil, err
	}
	// Near the limit the members that earlier rows created must be counted here before
	// the next rows are checked.
	if s.registry.Limit()-s.registry.Members() < 3*MaxImport {
		committed = nil
	}
	outcomes, err := s.registry.DecideMany(ctx, s.importDecisions(principal, rows, replace, 0), committed)
	if err != nil {
		return nil, err
	}
	out := make([]ImportResult, len(outcomes))
	for i := range outcomes {
		o := &outcomes[i]
		if out[i].Err = o.Err; o.Err == nil {
			out[i] = imported(&o.Before, &o.After, len(o.Changes) > 0)
		}
	}
	return out, nil
}

func imported(before, after *devices.Member, changed bool) ImportResult {
	created := !before.Known() && after.Known()
	return ImportResult{Created: created, Changed: changed && !created, FirstClient: after.Admission == devices.AdmissionMember && after.ClientID == ""}
}

func (s *Service) importDecisions(principal access.Principal, rows []ImportRow, replace bool, created int64) []devices.Decision {
	room := max(0, s.registry.Limit()-s.registry.Members()-int(created))
	list := make([]devices.Decision, len(rows))
	for i := range rows {
		row := &rows[i]
		status := s.registry.Status(row.Device, "")
		full := !status.Known && room == 0
		if !status.Known && room > 0 {
			room--
		}
		list[i] = devices.Decision{Device: row.Device, Who: principal.Key(), Import: true}
		decide := func(m *devices.Member, rotation devices.Rotation) error {
			if err := row.checkPermission(m, principal); err != nil {
				return err
			}
			switch {
			case full && !m.Known():
				return &devices.Error{Code: devices.CodeUnavailable, Part: "members", Detail: registry.DetailFull}
			case status.Revoked && m.Known() && m.Admission != devices.AdmissionRevoked:
				return &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "a revocation of the device is not written to the database yet; import the device again later"}
			}
			return row.decide(m, rotation, replace)
		}
		if replace {
			list[i].DecideWith = decide
		} else { // no credentials end, so the rotation has no effect
			list[i].Decide = func(m *devices.Member) error { return decide(m, devices.Rotation{}) }
		}
	}
	return list
}

// decide applies the row to the member.
func (row *ImportRow) decide(m *devices.Member, rotation devices.Rotation, replace bool) error {
	replaced := m.ClientID != "" && row.ClientID != nil && *row.ClientID != m.ClientID
	revoked := m.Admission == devices.AdmissionRevoked
	switch {
	case replace && (replaced || revoked):
		registry.RaiseGeneration(m, rotation, "imported")
	case revoked:
		return devices.Errorf(devices.CodeForbidden, "the device was revoked; approve it, or import it with replace_client to admit it again")
	case replaced:
		return devices.Errorf(devices.CodeForbidden, "the device has another admitted client; import it with replace_client to replace that client")
	}
	if row.ClientID != nil {
		m.ClientID = *row.ClientID
	}
	m.Admit("")
	if row.Serial != nil {
		m.Serial = *row.Serial
	}
	edit := Edit{Name: row.Name, Labels: row.Labels, Prefer: row.Prefer}
	return edit.apply(m)
}

// checkPermission returns an error if the caller may not write the row. A key that is
// limited by labels creates no devices, since it would choose the labels itself, and does not learn which devices there are.
func (row *ImportRow) checkPermission(m *devices.Member, principal access.Principal) error {
	switch {
	case principal.Caller.NeedsLabels() && (!m.Known() || !principal.Caller.Devices.MatchIdentity(string(row.Device), m.Labels)):
		return devices.Errorf(devices.CodeForbidden, "the key does not cover this device, or the fleet does not have it; a key that is limited by labels cannot create devices")
	case !principal.Caller.Devices.MatchIdentity(string(row.Device), m.Labels):
		return devices.Errorf(devices.CodeForbidden, "the key does not cover this device")
	}
	return nil
}
