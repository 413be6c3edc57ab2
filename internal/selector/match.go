package selector

import "time"

// Device is the device that a selector is evaluated on. An empty field, and a zero time, is a missing value.
type Device struct {
	ID       string // canonical
	Name     string
	Board    string
	Chip     string
	Firmware string
	ELF      string
	State    string // online, offline, pending or contested
	Pending  bool   // another client of the device waits for approval: state=pending is true beside State
	Labels   map[string]string

	Online    bool   // there is a connection
	Transport string // of the connection; not read unless Online
	Node      string // of the connection; not read unless Online
	Reason    string // why the device is offline; not read while Online
	LastSeen  time.Time

	// HasTool reports whether match is true for the name of one of the device's tools. nil: no tools.
	HasTool func(match func(name string) bool) bool
}

// Match reports whether the selector matches the device. It does not allocate.
func (s Selector) Match(d *Device, now time.Time) bool {
	for i := range s.terms {
		if !s.terms[i].match(d, now) {
			return false
		}
	}
	return true
}

// AllowsState reports whether a device in this state may match.
func (s Selector) AllowsState(state string) bool {
	d := Device{State: state}
	for i := range s.terms {
		if t := &s.terms[i]; t.Field == FieldState && !t.match(&d, time.Time{}) {
			return false
		}
	}
	return true
}

// MatchIdentity is Match for selectors without an Identity error: a selector with any other field matches
// nothing. It does not allocate.
func (s Selector) MatchIdentity(id string, labels map[string]string) bool {
	d := Device{ID: id, Labels: labels}
	for i := range s.terms {
		if t := &s.terms[i]; t.Field != FieldDevice && t.Field != FieldLabel || !t.match(&d, time.Time{}) {
			return false
		}
	}
	return true
}

func (t *Term) match(d *Device, now time.Time) bool {
	switch t.Field {
	case FieldSeen:
		return t.matchSeen(d, now)
	case FieldTool:
		return t.matchTool(d)
	}
	value, has := t.value(d)
	also := t.Field == FieldState && d.Pending && matchAny(t.Values, "pending")
	switch t.Op {
	case OpIn:
		return has && matchAny(t.Values, value) || also
	case OpNotIn:
		return (!has || !matchAny(t.Values, value)) && !also
	case OpHas:
		return has
	case OpLacks:
		return !has
	}
	order, ok := CompareVersions(value, t.Version)
	return ok && t.Op.accepts(order)
}

// accepts reports whether the comparison is true for this result.
func (op Op) accepts(order int) bool {
	switch op {
	case OpLess:
		return order < 0
	case OpLessEqual:
		return order <= 0
	case OpGreater:
		return order > 0
	case OpGreaterEqual:
		return order >= 0
	}
	return false
}

// value returns the device's value of the field, and whether it has one.
func (t *Term) value(d *Device) (value string, has bool) {
	switch t.Field {
	case FieldLabel:
		value, has = d.Labels[t.Label]
		return value, has // which may be empty
	case FieldDevice:
		value = d.ID
	case FieldState:
		value = d.State
	case FieldTransport:
		if d.Online {
			value = d.Transport
		}
	case FieldNode:
		if d.Online {
			value = d.Node
		}
	case FieldReason:
		if !d.Online {
			value = d.Reason
		}
	case FieldName:
		value = d.Name
	case FieldBoard:
		value = d.Board
	case FieldChip:
		value = d.Chip
	case FieldFirmware:
		value = d.Firmware
	case FieldELF:
		value = d.ELF
	}
	return value, value != ""
}

// Cutoff returns the time that seen is compared with: Age before the time of At, else before now.
func (t *Term) Cutoff(now time.Time) time.Time {
	if !t.from.IsZero() {
		now = t.from
	}
	return now.Add(-t.Age)
}

// matchSeen compares the time since the device was seen: an online device is seen now, and one that never
// connected has no value.
func (t *Term) matchSeen(d *Device, now time.Time) bool {
	has := d.Online || !d.LastSeen.IsZero()
	age := time.Duration(0)
	if !d.Online {
		age = t.Cutoff(now).Sub(d.LastSeen) + t.Age
	}
	switch t.Op {
	case OpHas:
		return has
	case OpLacks:
		return !has
	case OpLess:
		return has && age < t.Age
	}
	return has && age > t.Age
}

func (t *Term) matchTool(d *Device) bool {
	match := t.tool
	if t.Op == OpHas || t.Op == OpLacks {
		match = anyTool
	}
	has := d.HasTool != nil && d.HasTool(match)
	return has == (t.Op == OpIn || t.Op == OpHas)
}

func anyTool(string) bool { return true }

func matchAny(values []Value, text string) bool {
	for i := range values {
		if values[i].Match(text) {
			return true
		}
	}
	return false
}
