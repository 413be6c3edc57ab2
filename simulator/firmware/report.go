package firmware

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"
)

// deviceStats is what one device counts; guarded by the device's mutex.
type deviceStats struct {
	otaChecks, activations               uint64
	upgrades, failedUpgrades, rollbacks  uint64
	downloadBytes                        uint64
	connects, connectFailures            uint64
	disconnects, closeFrames, sendErrors uint64
	hellos, serverHellos, crashes        uint64
	reboots, notifications, pings        uint64
	calls, duplicates                    uint64
	absences                             uint64
	markers                              map[string]uint64 // executions
	executed                             idSet
	recorded                             []CallRecord
	sessions                             []string
	messages                             []messageCount
	photos                               []PhotoRecord
	snapshots                            []SnapshotRecord
	audio                                *audioStats
	// What only devices with MQTT have.
	conversations, goodbyesSent, goodbyesObeyed uint64
	mqtt                                        *mqttStats
	udp                                         *udpStats
}

type messageCount struct {
	name string
	n    uint64
}

// markerArgument is a text that a caller may add to the arguments of any tool, which ignores it: executions are counted by it.
const markerArgument = "marker"

// CallRecord is one executed tool call.
type CallRecord struct {
	ID   int32  `json:"id"`
	Tool string `json:"tool"`
}

// PhotoRecord is one camera upload and the answer of the server.
type PhotoRecord struct {
	SHA256   string `json:"sha256"`
	Bytes    int    `json:"bytes"`
	Question string `json:"question"`
	Status   int    `json:"status"`
	Answer   string `json:"answer"`
}

// SnapshotRecord is one screen upload.
type SnapshotRecord struct {
	SHA256 string `json:"sha256"`
	Bytes  int    `json:"bytes"`
	Status int    `json:"status"`
}

// DeviceReport is one device in the report; README.md explains every field.
type DeviceReport struct {
	ID                  string            `json:"id"`
	ClientID            string            `json:"client_id"`
	Serial              string            `json:"serial_number,omitempty"`
	Clone               bool              `json:"clone,omitempty"`
	Profile             string            `json:"profile"`
	Board               string            `json:"board"`
	Firmware            string            `json:"firmware"`
	State               State             `json:"state"`
	Error               string            `json:"error"`
	OTAChecks           uint64            `json:"ota_checks"`
	Activations         uint64            `json:"activations"`
	Upgrades            uint64            `json:"upgrades"`
	UpgradesFailed      uint64            `json:"upgrades_failed"`
	Rollbacks           uint64            `json:"rollbacks"`
	DownloadBytes       uint64            `json:"download_bytes"`
	ELF                 string            `json:"elf_sha256"`
	Image               string            `json:"image_state"`
	Reboots             uint64            `json:"reboots"`
	Crashes             uint64            `json:"crashes"`
	Connects            uint64            `json:"connects"`
	ConnectFailures     uint64            `json:"connect_failures"`
	Disconnects         uint64            `json:"disconnects"`
	CloseFrames         uint64            `json:"close_frames"`
	SendErrors          uint64            `json:"send_errors"`
	Hellos              uint64            `json:"hellos"`
	ServerHellos        uint64            `json:"server_hellos"`
	SessionIDs          []string          `json:"session_ids"`
	Tools               int               `json:"tools"`
	ToolsPublic         int               `json:"tools_public"`
	CatalogSHA256       string            `json:"catalog_sha256"`
	CatalogPublicSHA256 string            `json:"catalog_public_sha256"`
	Calls               []CallRecord      `json:"calls"`
	CallsTotal          uint64            `json:"calls_total"`
	DuplicateCallIDs    uint64            `json:"duplicate_call_ids"`
	Markers             map[string]uint64 `json:"markers,omitempty"`
	MarkersRepeated     uint64            `json:"markers_repeated"`
	Absences            uint64            `json:"absences"`
	Notifications       uint64            `json:"notifications_sent"`
	Photos              []PhotoRecord     `json:"photos"`
	Snapshots           []SnapshotRecord  `json:"snapshots"`
	Audio               AudioReport       `json:"audio"`
	Pings               uint64            `json:"pings"`
	Noops               uint64            `json:"noops"`
	ServerMessages      map[string]uint64 `json:"server_messages"`
	Transport           string            `json:"transport"`
	Conversations       uint64            `json:"conversations"`
	GoodbyesSent        uint64            `json:"goodbyes_sent"`
	GoodbyesReceived    uint64            `json:"goodbyes_received"`
	CONNACKCodes        map[string]uint64 `json:"connack_codes,omitempty"`
	MQTTReconnects      uint64            `json:"mqtt_reconnects"`
	KeepalivePings      uint64            `json:"keepalive_pings"`
	UDPSSRC             string            `json:"udp_ssrc,omitempty"`
	UDP                 *UDPReport        `json:"udp,omitempty"`
	Volume              int32             `json:"volume"`
	ClockMS             int64             `json:"clock_ms"`
}

// Percentiles are milliseconds.
type Percentiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

type Totals struct {
	Devices          int               `json:"devices"`
	Connected        int               `json:"connected"`
	States           map[State]int     `json:"states"`
	OTAChecks        uint64            `json:"ota_checks"`
	Connects         uint64            `json:"connects"`
	ConnectFailures  uint64            `json:"connect_failures"`
	Disconnects      uint64            `json:"disconnects"`
	Hellos           uint64            `json:"hellos"`
	ServerHellos     uint64            `json:"server_hellos"`
	Upgrades         uint64            `json:"upgrades"`
	UpgradesFailed   uint64            `json:"upgrades_failed"`
	Rollbacks        uint64            `json:"rollbacks"`
	DownloadBytes    uint64            `json:"download_bytes"`
	Reboots          uint64            `json:"reboots"`
	Crashes          uint64            `json:"crashes"`
	CallsTotal       uint64            `json:"calls_total"`
	DuplicateCallIDs uint64            `json:"duplicate_call_ids"`
	Markers          map[string]uint64 `json:"markers"`
	MarkersRepeated  uint64            `json:"markers_repeated"`
	Absences         uint64            `json:"absences"`
	Notifications    uint64            `json:"notifications_sent"`
	Photos           int               `json:"photos"`
	Snapshots        int               `json:"snapshots"`
	FramesSent       uint64            `json:"frames_sent"`
	FramesReceived   uint64            `json:"frames_received"`
	Pings            uint64            `json:"pings"`
	Noops            uint64            `json:"noops"`
	HelloMS          Percentiles       `json:"hello_ms"`
	Transports       map[string]int    `json:"transports"`
	Conversations    uint64            `json:"conversations"`
	GoodbyesSent     uint64            `json:"goodbyes_sent"`
	GoodbyesReceived uint64            `json:"goodbyes_received"`
	CONNACKCodes     map[string]uint64 `json:"connack_codes"`
	MQTTReconnects   uint64            `json:"mqtt_reconnects"`
	KeepalivePings   uint64            `json:"keepalive_pings"`
	ConnectWait      Percentiles       `json:"connect_wait"`
	ReconnectWait    Percentiles       `json:"reconnect_wait"`
	UDP              UDPReport         `json:"udp"`
	AudioCounts
}

// Report is what all devices of a fleet saw and did.
type Report struct {
	Seed    uint64         `json:"seed"`
	Started time.Time      `json:"started"`
	Ended   time.Time      `json:"ended"`
	Devices []DeviceReport `json:"devices"`
	Totals  Totals         `json:"totals"`
}

// recordCall notes a tool call the device executes, and whether it executed that id, or that marker, before in its life.
func (d *Device) recordCall(id int32, name, marker string) {
	d.fleet.callsTotal.Add(1)
	keep := d.fleet.callsLeft.Add(-1) >= 0
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stats.calls++
	if !d.stats.executed.add(id) {
		d.stats.duplicates++
	}
	if marker != "" {
		d.recordMarkerLocked(marker)
	}
	if keep {
		d.stats.recorded = append(d.stats.recorded, CallRecord{ID: id, Tool: name})
	}
}

func (d *Device) recordMarkerLocked(marker string) {
	if d.stats.markers == nil {
		d.stats.markers = map[string]uint64{}
	}
	d.stats.markers[marker]++
	d.fleet.marked.Add(1)
	if d.stats.markers[marker] > 1 {
		d.fleet.repeated.Add(1)
	}
}

// Report copies the device's figures. It is safe for concurrent use.
func (d *Device) Report() DeviceReport {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := &d.stats
	r := DeviceReport{
		ID: d.id, ClientID: d.clientID, Serial: d.serial, Clone: d.clone, Profile: d.profile.name, Board: d.runs.board,
		Firmware: d.runs.version, ELF: d.runs.elf, Image: slotValid.String(), State: d.life, Error: d.problem,
		OTAChecks: s.otaChecks, Activations: s.activations, Upgrades: s.upgrades,
		UpgradesFailed: s.failedUpgrades, Rollbacks: s.rollbacks, DownloadBytes: s.downloadBytes, Reboots: s.reboots, Crashes: s.crashes,
		Connects: s.connects, ConnectFailures: s.connectFailures, Disconnects: s.disconnects, CloseFrames: s.closeFrames,
		SendErrors: s.sendErrors, Hellos: s.hellos, ServerHellos: s.serverHellos,
		SessionIDs: append([]string{}, s.sessions...),
		Tools:      d.tools.count, ToolsPublic: d.tools.publicCount,
		CatalogSHA256: d.tools.sha, CatalogPublicSHA256: d.tools.publicSHA,
		Calls: append([]CallRecord{}, s.recorded...), CallsTotal: s.calls, DuplicateCallIDs: s.duplicates,
		Markers: maps.Clone(s.markers), Absences: s.absences, Notifications: s.notifications, Photos: append([]PhotoRecord{}, s.photos...),
		Snapshots: append([]SnapshotRecord{}, s.snapshots...), Pings: s.pings,
		ServerMessages: make(map[string]uint64, len(s.messages)), Volume: d.volume, ClockMS: int64(d.clock),
	}
	if d.slots != nil {
		r.Image = d.slots.states[d.slots.running].String()
	}
	for _, n := range s.markers {
		if n > 1 {
			r.MarkersRepeated++
		}
	}
	for _, m := range s.messages {
		r.ServerMessages[m.name] = m.n
		if m.name == "noop" {
			r.Noops = m.n
		}
	}
	d.reportAudioLocked(&r)
	d.reportMQTTLocked(&r)
	return r
}

// Report describes the fleet as it is now. It is safe for concurrent use.
func (f *Fleet) Report() *Report {
	r := &Report{Seed: f.options.Seed, Started: f.started, Ended: time.Now(), Devices: make([]DeviceReport, len(f.devices))}
	t := &r.Totals
	t.Devices, t.States, t.Markers = len(f.devices), make(map[State]int), make(map[string]uint64)
	t.Transports, t.CONNACKCodes = make(map[string]int), make(map[string]uint64)
	for i, d := range f.devices {
		r.Devices[i] = d.Report()
		v := &r.Devices[i]
		t.States[v.State]++
		t.OTAChecks += v.OTAChecks
		t.Connects += v.Connects
		t.ConnectFailures += v.ConnectFailures
		t.Disconnects += v.Disconnects
		t.Hellos += v.Hellos
		t.ServerHellos += v.ServerHellos
		t.Upgrades += v.Upgrades
		t.UpgradesFailed += v.UpgradesFailed
		t.Rollbacks += v.Rollbacks
		t.DownloadBytes += v.DownloadBytes
		t.Reboots += v.Reboots
		t.Crashes += v.Crashes
		t.CallsTotal += v.CallsTotal
		t.DuplicateCallIDs += v.DuplicateCallIDs
		for marker, n := range v.Markers {
			t.Markers[marker] += n
		}
		t.MarkersRepeated += v.MarkersRepeated
		t.Absences += v.Absences
		t.Notifications += v.Notifications
		t.Photos += len(v.Photos)
		t.Snapshots += len(v.Snapshots)
		t.FramesSent += v.Audio.FramesSent
		t.FramesReceived += v.Audio.FramesReceived
		t.addMQTT(v)
		t.Pings += v.Pings
		t.Noops += v.Noops
	}
	t.Connected = t.States[StateConnected]
	f.mu.Lock()
	t.HelloMS = percentilesOf(slices.Clone(f.latencies))
	t.ConnectWait, t.ReconnectWait = percentilesOf(slices.Clone(f.connects)), percentilesOf(slices.Clone(f.returns))
	f.mu.Unlock()
	return r
}

// percentilesOf uses the nearest rank; it sorts its argument.
func percentilesOf(us []uint32) Percentiles {
	if len(us) == 0 {
		return Percentiles{}
	}
	slices.Sort(us)
	at := func(percent int) float64 { return float64(us[(len(us)*percent+99)/100-1]) / 1000 }
	return Percentiles{P50: at(50), P99: at(99), Max: at(100)}
}

// WriteJSON writes the report as one document, device by device, so that a big fleet needs no second copy in memory.
func (r *Report) WriteJSON(w *bufio.Writer) error {
	_, err := fmt.Fprintf(w, "{\"seed\":%d,\"started\":%q,\"ended\":%q,\"devices\":[", r.Seed,
		r.Started.UTC().Format(time.RFC3339Nano), r.Ended.UTC().Format(time.RFC3339Nano))
	if err != nil {
		return err
	}
	for i := range r.Devices {
		line, err := json.Marshal(&r.Devices[i])
		if err != nil {
			return err
		}
		if i > 0 {
			_ = w.WriteByte(',')
		}
		_ = w.WriteByte('\n')
		_, _ = w.Write(line)
	}
	sum, err := json.Marshal(&r.Totals)
	if err != nil {
		return err
	}
	// bufio keeps the first write error and returns it from the last call.
	_, err = fmt.Fprintf(w, "\n],\"totals\":%s}\n", sum)
	return err
}
