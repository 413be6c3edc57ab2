package main

import (
	"bufio"
	"fmt"
	"maps"
	"slices"

	"fleetd/simulator/firmware"
)

// writeText writes a few lines for a person.
func writeText(w *bufio.Writer, r *firmware.Report) error {
	t := &r.Totals
	_, err := fmt.Fprintf(w, "%d devices in %.1f s, seed %d\n", t.Devices, r.Ended.Sub(r.Started).Seconds(), r.Seed)
	if err != nil {
		return err
	}
	states := make([]string, 0, len(t.States))
	for s := range t.States {
		states = append(states, string(s))
	}
	slices.Sort(states)
	for _, s := range states {
		fmt.Fprintf(w, "  %-22s %d\n", s, t.States[firmware.State(s)])
	}
	fmt.Fprintf(w, "OTA checks %d, connects %d (%d failed), disconnects %d, reboots %d, crashes %d\n",
		t.OTAChecks, t.Connects, t.ConnectFailures, t.Disconnects, t.Reboots, t.Crashes)
	if t.Upgrades+t.UpgradesFailed > 0 {
		fmt.Fprintf(w, "firmware: %d images flashed, %d attempts failed, %d rolled back, %d bytes loaded\n", t.Upgrades, t.UpgradesFailed, t.Rollbacks, t.DownloadBytes)
	}
	fmt.Fprintf(w, "wait for server hello: p50 %.1f ms, p99 %.1f ms, max %.1f ms\n", t.HelloMS.P50, t.HelloMS.P99, t.HelloMS.Max)
	fmt.Fprintf(w, "calls %d (%d ids twice), notifications %d, photos %d, snapshots %d, audio frames %d up %d down\n",
		t.CallsTotal, t.DuplicateCallIDs, t.Notifications, t.Photos, t.Snapshots, t.FramesSent, t.FramesReceived)
	writeMarkers(w, t)
	writeMQTT(w, t)
	problems := map[string]int{}
	for i := range r.Devices {
		if p := r.Devices[i].Error; p != "" {
			problems[p]++
		}
	}
	keys := make([]string, 0, len(problems))
	for p := range problems {
		keys = append(keys, p)
	}
	slices.SortFunc(keys, func(a, b string) int { return problems[b] - problems[a] })
	for i, p := range keys {
		if i == 10 {
			fmt.Fprintf(w, "  and %d other problems\n", len(keys)-i)
			break
		}
		fmt.Fprintf(w, "  %d x %s\n", problems[p], p)
	}
	return nil
}

// maxMarkers is how many markers the text lists; the JSON report has all.
const maxMarkers = 20

// writeMarkers writes how often calls with a marker were executed.
func writeMarkers(w *bufio.Writer, t *firmware.Totals) {
	for i, marker := range slices.Sorted(maps.Keys(t.Markers)) {
		if i == maxMarkers {
			fmt.Fprintf(w, "  and %d other markers\n", len(t.Markers)-i)
			break
		}
		fmt.Fprintf(w, "  marker %q executed %d x\n", marker, t.Markers[marker])
	}
	if t.MarkersRepeated > 0 {
		fmt.Fprintf(w, "  REPEATED: %d times a device executed a marker more than once\n", t.MarkersRepeated)
	}
}

// writeMQTT writes the lines about MQTT, UDP and conversations, as far as there were any.
func writeMQTT(w *bufio.Writer, t *firmware.Totals) {
	if t.Transports["mqtt"] > 0 {
		fmt.Fprintf(w, "MQTT devices %d, CONNACK codes %v, reconnects %d, keepalive pings %d\n",
			t.Transports["mqtt"], t.CONNACKCodes, t.MQTTReconnects, t.KeepalivePings)
		fmt.Fprintf(w, "start to CONNACK: p50 %.1f ms, p99 %.1f ms, max %.1f ms; loss to CONNACK: p50 %.1f ms, p99 %.1f ms, max %.1f ms\n",
			t.ConnectWait.P50, t.ConnectWait.P99, t.ConnectWait.Max, t.ReconnectWait.P50, t.ReconnectWait.P99, t.ReconnectWait.Max)
	}
	if t.Conversations > 0 {
		fmt.Fprintf(w, "conversations over UDP %d, goodbyes %d sent %d received; packets %d up, %d down, %d missing, refused",
			t.Conversations, t.GoodbyesSent, t.GoodbyesReceived, t.UDP.Sent, t.UDP.Received, t.UDP.Missing)
		for verdict, n := range t.UDP.Verdicts {
			if v := firmware.Verdict(verdict); v != firmware.Accepted {
				fmt.Fprintf(w, " %s %d", v, n)
			}
		}
		fmt.Fprintln(w)
	}
	if t.Spoken+t.Audible > 0 {
		fmt.Fprintf(w, "spoken %d, audible %d, echo: identical %d, lost %d, out of order %d, foreign %d; dropped: queue full %d, not speaking %d, cut off %d, reset %d\n",
			t.Spoken, t.Audible, t.EchoIdentical, t.EchoLost, t.EchoOutOfOrder, t.EchoForeign,
			t.DroppedQueueFull, t.DroppedNotSpeaking, t.CutOff, t.ResetByStart)
	}
}
