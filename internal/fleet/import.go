package fleet

import (
	"context"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
)

// MaxImport is how many rows Import takes at once.
const MaxImport = 1000

// ImportRow is what an import writes on one device; nil leaves a field alone.
type ImportRow struct {
	Device   devices.ID
	ClientID *string // empty: none is admitted, and the first that comes will be
	Name     *string
	Prefer   *devices.Transport
	Serial   *string
	Labels   map[string]*string // to set; nil removes one
}

// Imported is what became of a row.
type Imported struct {
	Err     error // why it was refused; nothing is changed then
	Created bool
	Changed bool // and not created
	// FirstClient says that the device is a member without a client: the first that
	// comes is admitted.
	FirstClient bool
}

// CheckImport tells what Import would make of rows, and changes nothing. created is
// how many devices earlier rows of the file would make. With an error nothing is
// known.
func (s *Service) CheckImport(ctx context.Context, by access.By, rows []ImportRow, replace bool, created int64) ([]Imported, error) {
	if err := s.registry.Judge(); err != nil {
		return nil, err
	}
	var known []devices.ID
	for _, row := range rows {
		if s.registry.Standing(row.Device, "").Known {
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
	out := make([]Imported, len(rows))
	rotation := s.registry.Rotation()
	for i, d := range s.importDecisions(by, rows, replace, created) {
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

// Import writes rows, at most MaxImport, each of another device, in one
// transaction. A device that is not known becomes a member. replace lets a row
// replace the client of a member, and admit a device that was revoked. committed is
// called when the rows are in the database and come into force here: the next may
// be imported. With an error it is not known whether anything was written.
func (s *Service) Import(ctx context.Context, by access.By, rows []ImportRow, replace bool, committed func()) ([]Imported, error) {
	if err := s.registry.Judge(); err != nil {
		return nil, err
	}
	// Those before may be no members here yet, and the next have to know of these if
	// the fleet is about to be full.
	if s.registry.Limit()-s.registry.Members() < 3*MaxImport {
		committed = nil
	}
	outcomes, err := s.registry.DecideMany(ctx, s.importDecisions(by, rows, replace, 0), committed)
	if err != nil {
		return nil, err
	}
	out := make([]Imported, len(outcomes))
	for i := range outcomes {
		o := &outcomes[i]
		if out[i].Err = o.Err; o.Err == nil {
			out[i] = imported(&o.Before, &o.After, len(o.Changes) > 0)
		}
	}
	return out, nil
}

func imported(before, after *devices.Member, changed bool) Imported {
	created := !before.Known() && after.Known()
	return Imported{Created: created, Changed: changed && !created, FirstClient: after.Admission == devices.AdmissionMember && after.ClientID == ""}
}

func (s *Service) importDecisions(by access.By, rows []ImportRow, replace bool, created int64) []devices.Decision {
	room := max(0, s.registry.Limit()-s.registry.Members()-int(created))
	list := make([]devices.Decision, len(rows))
	for i := range rows {
		row := &rows[i]
		is := s.registry.Standing(row.Device, "")
		full := !is.Known && room == 0
		if !is.Known && room > 0 {
			room--
		}
		list[i] = devices.Decision{Device: row.Device, Who: by.Key(), Import: true}
		decide := func(m *devices.Member, rotation devices.Rotation) error {
			switch {
			case full && !m.Known():
				return &devices.Error{Code: devices.CodeUnavailable, Part: "members", Detail: "the fleet has as many devices as --members-limit allows"}
			case is.Revoked && m.Known() && m.Admission != devices.AdmissionRevoked:
				return &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "a revocation of the device is not recorded yet; import it again when it is"}
			}
			return row.decide(m, by, rotation, replace)
		}
		if replace {
			list[i].DecideWith = decide
		} else { // no credentials end, so that the rotation does not matter
			list[i].Decide = func(m *devices.Member) error { return decide(m, devices.Rotation{}) }
		}
	}
	return list
}

// decide makes the member what the row says.
func (row *ImportRow) decide(m *devices.Member, by access.By, rotation devices.Rotation, replace bool) error {
	if err := row.permitted(m, by); err != nil {
		return err
	}
	replaced := m.ClientID != "" && row.ClientID != nil && *row.ClientID != m.ClientID
	revoked := m.Admission == devices.AdmissionRevoked
	switch {
	case replace && (replaced || revoked):
		registry.Raise(m, rotation, "imported")
	case revoked:
		return devices.Errorf(devices.CodeForbidden, "the device was revoked; approve it, or import with replace_client to admit it again")
	case replaced:
		return devices.Errorf(devices.CodeForbidden, "another client is admitted under the id; import with replace_client to replace it")
	}
	m.Admission, m.Joined = devices.AdmissionMember, devices.TransportNone
	if row.ClientID != nil {
		m.ClientID = *row.ClientID
	}
	if row.Serial != nil {
		m.Serial = *row.Serial
	}
	edit := Edit{Name: row.Name, Merge: row.Labels, Prefer: row.Prefer}
	return edit.apply(m)
}

// permitted tells why the caller may not write the row. A key for devices by label
// creates none: it would choose the label itself.
func (row *ImportRow) permitted(m *devices.Member, by access.By) error {
	switch {
	case !m.Known() && by.Who.NeedsLabels():
		return devices.Errorf(devices.CodeForbidden, "the device is not known, and a key for devices with labels creates none")
	case !by.Who.Devices.MatchIdentity(string(row.Device), m.Labels):
		return devices.Errorf(devices.CodeForbidden, "the key is not for this device")
	}
	return nil
}
