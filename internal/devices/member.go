package devices

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Member is what is decided of a device: its admission, the generation of its
// credentials, and what operators write. The zero Admission is that of a device
// that is not known. It is the state folded from the device's changes.
type Member struct {
	ID        ID
	Admission Admission
	ClientID  string // the admitted Client-Id; empty: the first that comes is admitted
	Name      string
	Labels    map[string]string
	Prefer    Transport // what the OTA reply offers; empty for the node's default
	Serial    string    // eFuse serial number, as reported or imported
	// Joined is the transport that was offered to a device that joined by itself
	// under open admission; empty once somebody decided about it, or it
	// connected. Until then it expires.
	Joined    Transport
	FirstSeen time.Time
	Revision  int64 // of the last change

	Generation    int64
	Previous      int64     // valid, too, until PreviousUntil
	PreviousUntil time.Time // zero: it is not valid
	Reason        string    // of the last change of Generation
}

// Known tells whether the device is a member, or was one and is revoked.
func (m *Member) Known() bool {
	return m.Admission == AdmissionMember || m.Admission == AdmissionRevoked
}

// Exception is the record of the member's credentials; ok is false if they are
// those of generation 0.
func (m *Member) Exception() (x Exception, ok bool) {
	revoked := m.Admission == AdmissionRevoked
	return Exception{Device: m.ID, Generation: m.Generation, Revoked: revoked, Reason: m.Reason, Previous: m.Previous, PreviousUntil: m.PreviousUntil},
		m.Generation > 0 || revoked
}

// Aspect names what a change is about.
type Aspect string

// Aspects. A label has the prefix AspectLabel before its key.
const (
	AspectJoin       Aspect = "join"       // a device joined by itself: joinValue
	AspectImport     Aspect = "import"     // one change of everything that an import changed: importValue
	AspectAdmission  Aspect = "admission"  // member, revoked, forgotten or expired
	AspectClient     Aspect = "client"     // the admitted Client-Id
	AspectGeneration Aspect = "generation" // of the credentials: generationValue
	AspectName       Aspect = "name"
	AspectTransport  Aspect = "transport"
	AspectSerial     Aspect = "serial"
	AspectLabel      Aspect = "label:"
	AspectKey        Aspect = "key"      // of the fleet: an API key
	AspectPolicy     Aspect = "policy"   // of the fleet: a version of the tool guard's policy
	AspectRotation   Aspect = "rotation" // of the fleet: the generation of all devices
)

// Change is one entry of the log of decisions. Revisions have no gaps, and their
// order is that of the commits.
type Change struct {
	Revision int64           `json:"revision"`
	ID       string          `json:"id"`               // random; a decision that is made again has the same
	Device   ID              `json:"device,omitempty"` // empty: of the fleet
	Aspect   Aspect          `json:"aspect"`
	Value    json.RawMessage `json:"value"` // JSON; null: removed
	Who      string          `json:"who"`
	At       time.Time       `json:"at"` // by the clock of the node that decided
}

// Position is a place in the log: a revision with the id of its change, and the
// lineage that both belong to.
type Position struct {
	Lineage  string `json:"lineage"`
	Revision int64  `json:"revision"`
	ID       string `json:"id"` // empty if Revision is 0
}

// Decision is one thing that somebody decides about a device. Decide gets what
// the database holds, locked, and changes it; an error refuses the decision and
// changes nothing. It runs inside a transaction, so it must neither wait nor do
// I/O, and it may run again if the transaction has to be repeated.
type Decision struct {
	ID     string // of the first change it makes; random
	Device ID
	Who    string
	// Import makes one change of everything, with AspectImport.
	Import bool
	// Once: a change of the device that has this ID already is not made again.
	Once   bool
	Decide func(m *Member) error
	// DecideWith is Decide for what depends on the rotation of the fleet, which
	// stays as it is until the decision is committed. One of the two is set.
	DecideWith func(m *Member, r Rotation) error
}

// Make decides. r matters if DecideWith is set.
func (d *Decision) Make(m *Member, r Rotation) error {
	if d.DecideWith != nil {
		return d.DecideWith(m, r)
	}
	return d.Decide(m)
}

// Outcome is what became of a Decision: its changes in order of their revisions,
// none if nothing differs, and the state after them.
type Outcome struct {
	Err     error // of Decide
	After   Member
	Changes []Change
	// Before is the state that Decide got.
	Before Member
}

type joinValue struct {
	ClientID  string    `json:"client_id"`
	Transport Transport `json:"transport"` // that was offered
}

type importValue struct {
	Admission Admission          `json:"admission,omitempty"`
	ClientID  *string            `json:"client_id,omitempty"`
	Name      *string            `json:"name,omitempty"`
	Transport *Transport         `json:"transport,omitempty"`
	Serial    *string            `json:"serial,omitempty"`
	Labels    map[string]*string `json:"labels,omitempty"` // nil: removed
	// Generation is set if the admitted client was replaced.
	Generation *generationValue `json:"generation,omitempty"`
}

type generationValue struct {
	Generation    int64     `json:"generation"`
	Previous      int64     `json:"previous,omitzero"`
	PreviousUntil time.Time `json:"previous_until,omitzero"`
	Reason        string    `json:"reason,omitempty"`
}

func (m *Member) generation() generationValue {
	return generationValue{m.Generation, m.Previous, m.PreviousUntil.UTC(), m.Reason}
}

func (m *Member) setGeneration(g generationValue) {
	m.Generation, m.Previous, m.PreviousUntil, m.Reason = g.Generation, g.Previous, g.PreviousUntil, g.Reason
}

// Clone copies the member with its labels.
func (m Member) Clone() Member {
	m.Labels = maps.Clone(m.Labels)
	return m
}

// value encodes what a change says. None of the types it is used with can fail.
func value(v any) json.RawMessage {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return text
}

// ChangesOf are the changes that make after out of before, without revision, id,
// author and time. Folding them into before gives after.
func ChangesOf(before, after *Member, imported bool) (list []Change) {
	add := func(a Aspect, v any) {
		list = append(list, Change{Device: after.ID, Aspect: a, Value: value(v)})
	}
	if imported {
		if v, differs := importOf(before, after); differs {
			add(AspectImport, v)
		}
		return list
	}
	if !before.Known() && after.Admission == AdmissionMember && after.Joined != TransportNone {
		add(AspectJoin, joinValue{after.ClientID, after.Joined})
		before = &Member{ID: before.ID, Admission: AdmissionMember, ClientID: after.ClientID, Joined: after.Joined,
			Generation: before.Generation, Previous: before.Previous, PreviousUntil: before.PreviousUntil, Reason: before.Reason}
	}
	if after.Admission != before.Admission {
		add(AspectAdmission, after.Admission)
	}
	if !after.Known() {
		if after.generation() != before.generation() {
			add(AspectGeneration, after.generation())
		}
		return list
	}
	if after.ClientID != before.ClientID {
		add(AspectClient, after.ClientID)
	}
	if after.generation() != before.generation() {
		add(AspectGeneration, after.generation())
	}
	if after.Name != before.Name {
		add(AspectName, after.Name)
	}
	if after.Prefer != before.Prefer {
		add(AspectTransport, after.Prefer)
	}
	if after.Serial != before.Serial {
		add(AspectSerial, after.Serial)
	}
	labels := labelsOf(before, after)
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		add(AspectLabel+Aspect(key), labels[key])
	}
	return list
}

func importOf(before, after *Member) (v importValue, differs bool) {
	if after.Admission != before.Admission {
		v.Admission, differs = after.Admission, true
	}
	if after.ClientID != before.ClientID {
		v.ClientID, differs = &after.ClientID, true
	}
	if after.Name != before.Name {
		v.Name, differs = &after.Name, true
	}
	if after.Prefer != before.Prefer {
		v.Transport, differs = &after.Prefer, true
	}
	if after.Serial != before.Serial {
		v.Serial, differs = &after.Serial, true
	}
	if g := after.generation(); g != before.generation() {
		v.Generation, differs = &g, true
	}
	v.Labels = labelsOf(before, after)
	return v, differs || len(v.Labels) > 0
}

// labelsOf are the labels that differ; nil is one that is gone.
func labelsOf(before, after *Member) map[string]*string {
	var out map[string]*string
	put := func(key string, value *string) {
		if out == nil {
			out = map[string]*string{}
		}
		out[key] = value
	}
	for key, value := range after.Labels {
		if old, had := before.Labels[key]; !had || old != value {
			put(key, &value)
		}
	}
	for key := range before.Labels {
		if _, has := after.Labels[key]; !has {
			put(key, nil)
		}
	}
	return out
}

// Fold applies one change of the device: m becomes the state after it. A device
// that is forgotten or expired keeps the generation of its credentials alone.
func (m *Member) Fold(c Change) error {
	if err := m.fold(c); err != nil {
		return fmt.Errorf("change %d of %s, %s: %w", c.Revision, c.Device, c.Aspect, err)
	}
	m.Revision = c.Revision
	if c.Aspect != AspectJoin {
		m.Joined = TransportNone
	}
	return nil
}

func (m *Member) fold(c Change) error {
	switch c.Aspect {
	case AspectJoin:
		var v joinValue
		err := json.Unmarshal(c.Value, &v)
		m.begin(c)
		m.ClientID, m.Joined = v.ClientID, v.Transport
		return err
	case AspectImport:
		return m.foldImport(c)
	case AspectAdmission:
		var to Admission
		err := json.Unmarshal(c.Value, &to)
		switch {
		case to != AdmissionMember && to != AdmissionRevoked:
			*m = Member{ID: c.Device, Generation: m.Generation, Previous: m.Previous, PreviousUntil: m.PreviousUntil, Reason: m.Reason}
		case !m.Known():
			m.begin(c)
			m.Admission = to
		default:
			m.Admission = to
		}
		return err
	case AspectClient:
		return json.Unmarshal(c.Value, &m.ClientID)
	case AspectGeneration:
		var g generationValue
		err := json.Unmarshal(c.Value, &g)
		m.setGeneration(g)
		return err
	case AspectName:
		return json.Unmarshal(c.Value, &m.Name)
	case AspectTransport:
		return json.Unmarshal(c.Value, &m.Prefer)
	case AspectSerial:
		return json.Unmarshal(c.Value, &m.Serial)
	}
	key, isLabel := strings.CutPrefix(string(c.Aspect), string(AspectLabel))
	if !isLabel {
		return fmt.Errorf("this fleetd does not know the aspect; start a newer one")
	}
	if bytes.Equal(c.Value, []byte("null")) {
		m.setLabel(key, nil)
		return nil
	}
	var text string
	err := json.Unmarshal(c.Value, &text)
	m.setLabel(key, &text)
	return err
}

func (m *Member) foldImport(c Change) error {
	var v importValue
	err := json.Unmarshal(c.Value, &v)
	if v.Admission != "" && !m.Known() {
		m.begin(c)
	}
	if v.Admission != "" {
		m.Admission = v.Admission
	}
	if v.ClientID != nil {
		m.ClientID = *v.ClientID
	}
	if v.Name != nil {
		m.Name = *v.Name
	}
	if v.Transport != nil {
		m.Prefer = *v.Transport
	}
	if v.Serial != nil {
		m.Serial = *v.Serial
	}
	if v.Generation != nil {
		m.setGeneration(*v.Generation)
	}
	if len(v.Labels) > 0 {
		m.Labels = maps.Clone(m.Labels)
		for key, value := range v.Labels {
			m.putLabel(key, value)
		}
	}
	return err
}

// begin makes a device that was not known a member. What an earlier device of
// the same id left behind is the generation of its credentials.
func (m *Member) begin(c Change) {
	*m = Member{ID: c.Device, Admission: AdmissionMember, FirstSeen: c.At, Generation: m.Generation, Previous: m.Previous, PreviousUntil: m.PreviousUntil, Reason: m.Reason}
}

// setLabel replaces the map: a reader of the one before keeps what it has.
func (m *Member) setLabel(key string, value *string) {
	m.Labels = maps.Clone(m.Labels)
	m.putLabel(key, value)
}

func (m *Member) putLabel(key string, value *string) {
	if value == nil {
		delete(m.Labels, key)
		return
	}
	if m.Labels == nil {
		m.Labels = map[string]string{}
	}
	m.Labels[key] = *value
}
