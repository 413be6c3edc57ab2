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

// Member is the registry's state of a device: its admission, the generation of its
// credentials, and what operators write. The zero Admission means unknown. It results
// from applying (folding) the device's changes in order.
type Member struct {
	ID        ID
	Admission Admission
	ClientID  string // the admitted Client-Id; empty: the first client is admitted
	Name      string
	Labels    map[string]string
	Prefer    Transport // what the OTA reply offers; empty for the node's default
	Serial    string    // eFuse serial number, as reported or imported
	// JoinTransport is the transport that was offered to a device that joined by itself
	// under open admission. It is empty once an operator decided about the device, or it
	// connected; until then the device expires.
	JoinTransport Transport
	FirstSeen     time.Time
	Revision      int64 // of the last change

	Generation    int64
	Previous      int64     // also valid until PreviousUntil
	PreviousUntil time.Time // zero: Previous is not valid
	Reason        string    // of the last change of Generation

	// Refused are clients that an operator refused. They stay refused if the device is
	// forgotten.
	Refused Refused
}

// Known reports whether the device is a member, or a revoked one.
func (m *Member) Known() bool {
	return m.Admission == AdmissionMember || m.Admission == AdmissionRevoked
}

// Admit makes the device a member with this client, which is no longer refused; an empty
// one keeps the current client.
func (m *Member) Admit(clientID string) {
	m.Admission, m.JoinTransport = AdmissionMember, TransportNone
	if clientID != "" {
		m.ClientID = clientID
	}
	m.Refused = m.Refused.Without(m.ClientID)
}

// Exception returns the record of the member's credentials; ok is false if they have
// generation 0 and no client is refused.
func (m *Member) Exception() (x Exception, ok bool) {
	revoked := m.Admission == AdmissionRevoked
	return Exception{Device: m.ID, Generation: m.Generation, Revoked: revoked, Reason: m.Reason, Previous: m.Previous, PreviousUntil: m.PreviousUntil, Refused: m.Refused},
		m.Generation > 0 || revoked || m.Refused != ""
}

// Aspect is the part of the state that a change affects.
type Aspect string

// Aspects. A label's aspect is AspectLabel followed by its key.
const (
	AspectJoin       Aspect = "join"       // a device joined by itself: joinValue
	AspectImport     Aspect = "import"     // all changes of an import in one: importValue
	AspectAdmission  Aspect = "admission"  // member, revoked, forgotten or expired
	AspectClient     Aspect = "client"     // the admitted Client-Id
	AspectRefused    Aspect = "refused"    // the Client-Ids that are refused
	AspectGeneration Aspect = "generation" // of the credentials: generationValue
	AspectName       Aspect = "name"
	AspectTransport  Aspect = "transport"
	AspectSerial     Aspect = "serial"
	AspectLabel      Aspect = "label:"
	AspectKey        Aspect = "key"      // of the fleet: an API key
	AspectPolicy     Aspect = "policy"   // of the fleet: a version of the tool guard's policy
	AspectRotation   Aspect = "rotation" // of the fleet: the generation of all devices
)

// Aspects lists all, AspectLabel for those of labels.
var Aspects = []Aspect{AspectJoin, AspectImport, AspectAdmission, AspectClient, AspectRefused, AspectGeneration, AspectName, AspectTransport, AspectSerial,
	AspectLabel, AspectKey, AspectPolicy, AspectRotation}

// Change is one entry of the log of changes. Revisions have no gaps and are in order of
// the commits.
type Change struct {
	Revision int64           `json:"revision"`
	ID       string          `json:"id"`               // random; the same if the decision is repeated
	Device   ID              `json:"device,omitempty"` // empty: of the fleet
	Aspect   Aspect          `json:"aspect"`
	Value    json.RawMessage `json:"value"` // JSON; null: removed
	Who      string          `json:"who"`
	At       time.Time       `json:"at"` // by the clock of the node that decided
}

// Position is a position in the log: a revision, the id of its change, and the lineage
// of both. A restored database has another lineage.
type Position struct {
	Lineage  string `json:"lineage"`
	Revision int64  `json:"revision"`
	ID       string `json:"id"` // empty if Revision is 0
}

// Decision is one decision about a device. Decide receives the state in the database,
// locked, and changes it; an error refuses the decision and changes nothing. It runs
// inside a transaction: it must not block or do I/O, and it may run again if the
// transaction is repeated.
type Decision struct {
	ID     string // of its first change; random
	Device ID
	Who    string
	// Import combines all changes into one with AspectImport.
	Import bool
	// Once skips the decision if the device has a change with this ID already.
	Once   bool
	Decide func(m *Member) error
	// DecideWith is Decide for decisions that depend on the fleet's rotation, which cannot
	// change until the commit. Either Decide or DecideWith is set.
	DecideWith func(m *Member, r Rotation) error
}

// Make runs the decision. r is used only by DecideWith.
func (d *Decision) Make(m *Member, r Rotation) error {
	if d.DecideWith != nil {
		return d.DecideWith(m, r)
	}
	return d.Decide(m)
}

// Outcome is the result of a Decision: its changes in order of revision, none if nothing
// differs, and the state after them.
type Outcome struct {
	Err     error // of Decide
	After   Member
	Changes []Change
	// Before is the state that Decide received.
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
	// Generation is set if the admitted client was replaced, Refused if it was refused before.
	Generation *generationValue `json:"generation,omitempty"`
	Refused    *Refused         `json:"refused,omitempty"`
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

// Clone returns a copy of the member with its own labels.
func (m Member) Clone() Member {
	m.Labels = maps.Clone(m.Labels)
	return m
}

// value encodes the value of a change. It cannot fail for the types it is used with.
func value(v any) json.RawMessage {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return text
}

// ChangesOf returns the changes from before to after, without revision, id, author and
// time. imported combines them into one.
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
	if !before.Known() && after.Admission == AdmissionMember && after.JoinTransport != TransportNone {
		add(AspectJoin, joinValue{after.ClientID, after.JoinTransport})
		before = &Member{ID: before.ID, Admission: AdmissionMember, ClientID: after.ClientID, JoinTransport: after.JoinTransport,
			Generation: before.Generation, Previous: before.Previous, PreviousUntil: before.PreviousUntil, Reason: before.Reason, Refused: before.Refused}
	}
	if after.Admission != before.Admission {
		add(AspectAdmission, after.Admission)
	}
	if after.Refused != before.Refused {
		add(AspectRefused, after.Refused)
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
	if after.Refused != before.Refused {
		v.Refused, differs = &after.Refused, true
	}
	v.Labels = labelsOf(before, after)
	return v, differs || len(v.Labels) > 0
}

// labelsOf returns the labels that differ; nil means removed.
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

// Fold applies one change of the device. A device that is forgotten or expired keeps
// only the generation of its credentials and its refused clients.
func (m *Member) Fold(c Change) error {
	if err := m.fold(c); err != nil {
		return fmt.Errorf("change %d of %s, %s: %w", c.Revision, c.Device, c.Aspect, err)
	}
	m.Revision = c.Revision
	if c.Aspect != AspectJoin {
		m.JoinTransport = TransportNone
	}
	return nil
}

func (m *Member) fold(c Change) error {
	switch c.Aspect {
	case AspectJoin:
		var v joinValue
		err := json.Unmarshal(c.Value, &v)
		m.begin(c)
		m.ClientID, m.JoinTransport = v.ClientID, v.Transport
		return err
	case AspectImport:
		return m.foldImport(c)
	case AspectAdmission:
		var to Admission
		err := json.Unmarshal(c.Value, &to)
		switch {
		case to != AdmissionMember && to != AdmissionRevoked:
			*m = Member{ID: c.Device, Generation: m.Generation, Previous: m.Previous, PreviousUntil: m.PreviousUntil, Reason: m.Reason, Refused: m.Refused}
		case !m.Known():
			m.begin(c)
			m.Admission = to
		default:
			m.Admission = to
		}
		return err
	case AspectClient:
		return json.Unmarshal(c.Value, &m.ClientID)
	case AspectRefused:
		return json.Unmarshal(c.Value, &m.Refused)
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
		return fmt.Errorf("this version of fleetd does not support the aspect; upgrade this node")
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
	if v.Refused != nil {
		m.Refused = *v.Refused
	}
	if len(v.Labels) > 0 {
		m.Labels = maps.Clone(m.Labels)
		for key, value := range v.Labels {
			m.putLabel(key, value)
		}
	}
	return err
}

// begin makes an unknown device a member. It keeps the generation of the credentials
// that an earlier device with the same id had.
func (m *Member) begin(c Change) {
	*m = Member{ID: c.Device, Admission: AdmissionMember, FirstSeen: c.At, Generation: m.Generation, Previous: m.Previous, PreviousUntil: m.PreviousUntil, Reason: m.Reason, Refused: m.Refused}
}

// setLabel replaces the map, so that concurrent readers keep the old one.
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
