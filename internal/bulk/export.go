package bulk

import (
	"bufio"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"time"

	"fleetd/internal/cleantext"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// MaxLabelColumns is how many label keys the devices of one CSV file may have.
const MaxLabelColumns = 1000

// Each calls f with the devices of an export, a page at a time.
type Each func(f func([]devices.View) error) error

// ExportOptions are the options of Export.
type ExportOptions struct {
	Format Format
	// Secrets includes the admitted Client-Ids.
	Secrets bool
	// Client returns how a Client-Id is shown.
	Client func(clientID string) string
}

// Export writes the devices, except pending ones that were never members: an import would admit them. It may
// call each twice. If the format cannot represent the devices, the error is a *devices.Error, and nothing was
// written.
func Export(w io.Writer, opt ExportOptions, each Each) error {
	if opt.Format == NDJSON {
		return opt.exportNDJSON(w, each)
	}
	keys, err := labelKeys(each)
	if err != nil {
		return err
	}
	return opt.exportCSV(w, keys, each)
}

// fields are the names of what an import of the file reads, after the id and without labels.
func (o *ExportOptions) fields() []string {
	if o.Secrets {
		return []string{fieldName, fieldTransport, fieldSerial, fieldClientID, fieldAdmission}
	}
	return []string{fieldName, fieldTransport, fieldSerial, fieldAdmission}
}

// values are the values of fields.
func (o *ExportOptions) values(d *devices.Device) []string {
	if o.Secrets {
		return []string{d.Name, string(d.Prefer), d.Serial, d.ClientID, string(d.Admission)}
	}
	return []string{d.Name, string(d.Prefer), d.Serial, string(d.Admission)}
}

// labelKeys returns the keys of all labels, sorted.
func labelKeys(each Each) ([]string, error) {
	keys := map[string]bool{}
	err := each(func(page []devices.View) error {
		for _, v := range page {
			for key := range v.Device.Labels {
				keys[key] = true
			}
		}
		if len(keys) > MaxLabelColumns {
			return devices.Errorf(devices.CodeBadRequest, "the devices have more than %d label keys, too many for CSV columns; use format=ndjson, or select fewer devices", MaxLabelColumns)
		}
		return nil
	})
	return slices.Sorted(maps.Keys(keys)), err
}

func (o *ExportOptions) exportCSV(w io.Writer, keys []string, each Each) error {
	buffered := bufio.NewWriterSize(w, 64<<10)
	out := csv.NewWriter(buffered)
	header := append([]string{fieldID}, o.fields()...)
	for _, key := range keys {
		header = append(header, labelPrefix+key)
	}
	if err := out.Write(append(header, reported...)); err != nil {
		return err
	}
	var record []string
	err := each(func(page []devices.View) error {
		for i := range page {
			d := &page[i].Device
			if d.Admission == "" {
				continue
			}
			record = append(record[:0], string(d.ID))
			for _, value := range o.values(d) {
				record = append(record, optional(value))
			}
			for _, key := range keys {
				value, has := d.Labels[key]
				if has {
					value = Cell(value)
				}
				record = append(record, value)
			}
			for _, value := range o.state(&page[i]) {
				record = append(record, optional(cleantext.Lines(value))) // the device says it, and no import reads it
			}
			if err := out.Write(record); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	out.Flush()
	if err := out.Error(); err != nil {
		return err
	}
	return buffered.Flush()
}

// optional returns the cell of a value that may be missing.
func optional(value string) string {
	if value == "" {
		return ""
	}
	return Cell(value)
}

// state returns the facts and the state of a device, in the order of reported.
func (o *ExportOptions) state(v *devices.View) []string {
	d, p := &v.Device, &v.Presence
	reason, offline, connected, seen := p.Reason, p.OfflineSince, time.Time{}, p.LastSeen
	if p.Online {
		reason, offline, connected, seen = "", time.Time{}, p.ConnectedAt, clock.Now()
	}
	return []string{string(v.State), reason, stamp(offline), string(p.Transport), p.Node, d.Board, d.Chip, d.Firmware, d.ELF,
		string(p.MCP), strconv.Itoa(p.Tools), p.Catalog.String(), o.Client(d.ClientID), stamp(d.FirstSeen), stamp(seen), stamp(connected), strconv.FormatInt(d.Revision, 10)}
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02T15:04:05.000Z")
}

func (o *ExportOptions) exportNDJSON(w io.Writer, each Each) error {
	out := bufio.NewWriterSize(w, 64<<10)
	var line []byte
	err := each(func(page []devices.View) (err error) {
		for i := range page {
			d := &page[i].Device
			if d.Admission == "" {
				continue
			}
			if line, err = o.appendDevice(line[:0], &page[i]); err == nil {
				_, err = out.Write(append(line, '\n'))
			}
			if err != nil {
				return fmt.Errorf("write %s: %w", d.ID, err)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return out.Flush()
}

// appendDevice appends a device as a JSON object with its members in the order of columns.
func (o *ExportOptions) appendDevice(line []byte, v *devices.View) ([]byte, error) {
	d := &v.Device
	line = append(line, `{"`+fieldID+`":`...)
	line = jsonspan.AppendString(line, string(d.ID))
	names := o.fields()
	for i, value := range o.values(d) {
		line = appendMember(line, names[i], value)
	}
	if len(d.Labels) > 0 {
		labels, err := json.Marshal(d.Labels)
		if err != nil {
			return line, err
		}
		line = append(append(line, `,"`+fieldLabels+`":`...), labels...)
	}
	for i, value := range o.state(v) {
		line = appendMember(line, reported[i], value)
	}
	return append(line, '}'), nil
}

// appendMember appends a member unless its value is empty: an import keeps missing values. Numbers are written as
// numbers.
func appendMember(line []byte, name, value string) []byte {
	if value == "" {
		return line
	}
	line = append(jsonspan.AppendString(append(line, ','), name), ':')
	if name == "tools" || name == "revision" {
		return append(line, value...)
	}
	return jsonspan.AppendString(line, value)
}
