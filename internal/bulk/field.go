package bulk

import (
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"fleetd/internal/devices"
	"fleetd/internal/fleet"
)

// Names of the values in a row. In NDJSON labels are one object.
const (
	fieldID        = "id"
	fieldName      = "name"
	fieldTransport = "transport_wanted"
	// oldTransport is the name of fieldTransport in files of older versions.
	oldTransport   = "transport"
	fieldSerial    = "serial"
	fieldClientID  = "client_id"
	fieldAdmission = "admission"
	fieldLabels    = "labels"
	labelPrefix    = "label."
)

// Limits of values, in addition to those of edits, in bytes.
const (
	maxClientID = 128
	maxSerial   = 128
)

// reported are the further names in an export: what the device reported, and its state. An import ignores
// them.
var reported = []string{"state", "offline_reason", "offline_since", "connection", "node", "board", "chip", "firmware", "elf_sha256",
	"mcp_state", "tools", "catalog", "client", "first_seen", "last_seen", "connected_at", "revision"}

// columns is how faults list the columns of a file.
const columns = "id, name, transport_wanted, serial, client_id"

// set sets one field; null removes its value.
func (r *row) set(field string, column int64, value string, null bool) {
	if !utf8.ValidString(value) || strings.IndexByte(value, 0) >= 0 {
		r.fault(column, "%s has a byte that is not valid UTF-8, or zero", field)
		return
	}
	switch field {
	case fieldID:
		r.column = column
		id, err := devices.ParseID(value)
		if err != nil || null {
			r.fault(column, "id must be a MAC address or 1 to %d of [a-z0-9_-], not %s", devices.MaxIDLength, quoted(value))
		}
		r.Device = id
	case fieldName:
		r.Name = r.text(field, column, value, fleet.MaxName)
	case fieldSerial:
		r.Serial = r.text(field, column, value, maxSerial)
	case fieldClientID:
		r.ClientID = r.text(field, column, value, maxClientID)
	case fieldTransport, oldTransport:
		if r.Prefer != nil {
			r.fault(column, "transport is the former name of transport_wanted; give one of the two")
		}
		prefer := devices.Transport(value)
		if !slices.Contains([]devices.Transport{devices.TransportNone, devices.TransportWebSocket, devices.TransportMQTT}, prefer) {
			r.fault(column, "%s must be websocket or mqtt, not %s", field, quoted(value))
		}
		r.Prefer = &prefer
	}
}

func (r *row) text(field string, column int64, value string, most int) *string {
	if len(value) > most {
		r.fault(column, "%s has %d bytes, at most %d are allowed", field, len(value), most)
	}
	return &value
}

// setLabel sets a label; null removes it.
func (r *row) setLabel(key string, column int64, value string, null bool) {
	if r.Labels == nil {
		r.Labels = map[string]*string{}
	}
	switch {
	case null:
		r.Labels[key] = nil
		return
	case !utf8.ValidString(value) || strings.IndexByte(value, 0) >= 0:
		r.fault(column, "label %s has a byte that is not valid UTF-8, or zero", key)
	case len(value) > fleet.MaxLabelValue:
		r.fault(column, "label %s has %d bytes, at most %d are allowed", key, len(value), fleet.MaxLabelValue)
	}
	r.Labels[key] = &value
}

// setAdmission handles a column of exports: a device that was revoked becomes a member of another fleet only
// if the import replaces clients.
func (r *row) setAdmission(column int64, value string, replace bool) {
	switch {
	case value == string(devices.AdmissionRevoked) && !replace:
		r.fault(column, "the device was revoked where it was exported; leave the row out, or import it with replace_client to admit the device")
	case value != "" && value != string(devices.AdmissionMember) && value != string(devices.AdmissionRevoked):
		r.fault(column, "admission must be member or revoked, not %s", quoted(value))
	}
}

// checkLabels checks the labels of a complete row.
func (r *row) checkLabels() {
	set := 0
	for _, value := range r.Labels {
		if value != nil {
			set++
		}
	}
	if set > fleet.MaxLabels {
		r.fault(0, "the row has %d labels, at most %d are allowed", set, fleet.MaxLabels)
	}
}

// quoted returns a value for a fault.
func quoted(value string) string {
	const shown = 40
	if len(value) > shown {
		return strconv.Quote(strings.ToValidUTF8(value[:shown], "")) + "..."
	}
	return strconv.Quote(value)
}
