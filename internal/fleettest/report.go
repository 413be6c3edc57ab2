package fleettest

import (
	"encoding/json"
	"os/exec"
	"testing"
)

// Report is the part of the simulator's report that tests assert on; its
// README describes all of it.
type Report struct {
	Devices []ReportDevice `json:"devices"`
	Totals  struct {
		DuplicateCallIDs int               `json:"duplicate_call_ids"`
		Crashes          int               `json:"crashes"`
		CallsTotal       int               `json:"calls_total"`
		Hellos           int               `json:"hellos"`
		ServerHellos     int               `json:"server_hellos"`
		Transports       map[string]int    `json:"transports"`
		CONNACKCodes     map[string]int    `json:"connack_codes"`
		MQTTReconnects   int               `json:"mqtt_reconnects"`
		HelloMS          ReportPercentiles `json:"hello_ms"`
		ReconnectWait    ReportPercentiles `json:"reconnect_wait"`
		ReportEcho
	} `json:"totals"`
}

// ReportPercentiles are milliseconds.
type ReportPercentiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

// ReportEcho is what devices said and what came back to them, in packets.
type ReportEcho struct {
	Spoken             int `json:"spoken"`
	Heard              int `json:"heard"`
	EchoIdentical      int `json:"echo_identical"`
	EchoLost           int `json:"echo_lost"`
	EchoOutOfOrder     int `json:"echo_out_of_order"`
	EchoForeign        int `json:"echo_foreign"`
	DroppedQueueFull   int `json:"dropped_queue_full"`
	DroppedNotSpeaking int `json:"dropped_not_speaking"`
	CutOff             int `json:"cut_off"`
	ResetByStart       int `json:"reset_by_start"`
}

// ReportDevice is one simulated device.
type ReportDevice struct {
	ID            string `json:"id"`
	ClientID      string `json:"client_id"`
	Profile       string `json:"profile"`
	Firmware      string `json:"firmware"`
	Board         string `json:"board"`
	State         string `json:"state"`
	Error         string `json:"error"`
	Transport     string `json:"transport"`
	Connects      int    `json:"connects"`
	Tools         int    `json:"tools"`
	CatalogSHA256 string `json:"catalog_sha256"`
	PublicSHA256  string `json:"catalog_public_sha256"`
	Calls         []struct {
		ID   int    `json:"id"`
		Tool string `json:"tool"`
	} `json:"calls"`
	CallsTotal       int `json:"calls_total"`
	DuplicateCallIDs int `json:"duplicate_call_ids"`
	Notifications    int `json:"notifications_sent"`
	Photos           []struct {
		SHA256 string `json:"sha256"`
		Bytes  int64  `json:"bytes"`
		Status int    `json:"status"`
		Answer string `json:"answer"`
	} `json:"photos"`
	Snapshots []struct {
		SHA256 string `json:"sha256"`
		Status int    `json:"status"`
	} `json:"snapshots"`
	Audio struct {
		ReportEcho
		FramesSent  int    `json:"frames_sent"`
		SentSHA256  string `json:"sent_sha256"`
		HeardSHA256 string `json:"heard_sha256"`
	} `json:"audio"`
}

// UDPAttack is the report of `simulator --attack udp`.
type UDPAttack struct {
	Seconds     float64 `json:"seconds"`
	Sent        int     `json:"packets_sent"`
	PacketsBack int     `json:"packets_back"`
}

// MQTTAttack is the report of `simulator --attack mqtt`.
type MQTTAttack struct {
	Login  bool `json:"login"` // with credentials of a device
	Probes []struct {
		Name    string `json:"name"`
		CONNACK *int   `json:"connack"`
		Closed  bool   `json:"closed"`
		Error   string `json:"error"`
	} `json:"probes"`
}

// Attack runs the simulator as an enemy until it is done, and returns its
// report, a UDPAttack or an MQTTAttack.
func Attack[T any](t testing.TB, p Programs, args ...string) (report T) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), p.Simulator, append([]string{"--report", "json"}, args...)...).Output()
	if err != nil {
		t.Errorf("attack %v: %v", args, err)
		return report
	}
	if err := json.Unmarshal(out, &report); err != nil {
		t.Errorf("attack %v: %v\n%s", args, err, tail(string(out), 500))
	}
	return report
}
