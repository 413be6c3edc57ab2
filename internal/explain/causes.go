package explain

import "strings"

// Cause is why a device or a call is as it is: a stable word.
type Cause string

// About is what a cause explains.
type About string

// What causes explain.
const (
	AboutAny     About = ""
	AboutOffline About = "a device that is not connected"
	AboutOnline  About = "a device that is connected"
	AboutCall    About = "a call"
)

// Info describes a cause.
type Info struct {
	Cause   Cause
	About   About
	Meaning string
	Next    []string // what to do, in this order; DEVICE stands for the id
}

const (
	nextDoctor  = "fleetd doctor --mac DEVICE"
	nextLog     = "fleetd log DEVICE"
	nextRestart = "Restart the device: it gets new credentials at its OTA check."
	nextReach   = "From the device's network: can the address in the evidence be reached over TCP? See docs/connect-a-device.md."
	nextPower   = "Look at the device: power, Wi-Fi, display."
)

// causeAsleep is the cause of a device that connects when somebody wakes it.
const causeAsleep Cause = "asleep"

// Causes lists all causes, in the order of the rules that find them.
var Causes = []Info{
	{"well", AboutAny, "Nothing is wrong.", nil},
	{"waiting_approval", AboutOffline, "A client of the device waits for approval.", []string{"fleetd devices approve DEVICE, or the code that the device speaks", "Then restart the device if it does not connect within a minute."}},
	{"stranger_refused", AboutOffline, "The device is not a member of the fleet and was refused.", []string{"fleetd explain --strangers", nextRestart}},
	{"never_seen", AboutOffline, "Nothing of the device is recorded: no OTA check, no connection.", []string{"Compare the OTA URL in the device with the one that fleetd prints at its start.", nextDoctor}},
	{"revoked", AboutOffline, "Its credentials were revoked.", []string{"fleetd devices approve DEVICE", nextRestart}},
	{"contested", AboutOffline, "Two clients use this device id, and connections are refused.", []string{nextLog + " shows the addresses", "Turn one of the two off, or give it its own MAC address."}},
	{"cloned", AboutAny, "Two clients with this device id replace each other again and again.", []string{nextLog + " shows the addresses", "Turn one of the two off, or give it its own MAC address."}},
	{"boot_loop", AboutAny, "It starts again and again with one image: its firmware crashes, or its power fails.", []string{nextLog + " shows its OTA checks, one for each start", "Try another power supply and cable.", "If only devices with this image do so, give them another firmware."}},
	{"old_generation", AboutOffline, "It presents credentials that were replaced.", []string{nextRestart}},
	{"wrong_token", AboutOffline, "It presents credentials that fleetd never gave it, or of another fleet.", []string{nextRestart, nextDoctor}},
	{"hello_failed", AboutOffline, "It connects and sends no valid hello.", []string{nextLog, nextRestart, "Is a proxy between the device and the node, that does not pass WebSocket or MQTT on? See docs/troubleshooting.md.", "If its firmware is not stock firmware: does it send a hello first?"}},
	{"check_refused", AboutOffline, "Its last OTA check was refused.", []string{nextLog + " has the reason", nextDoctor}},
	{"crowded", AboutOffline, "Too many devices connected at once; it was not admitted in time.", []string{"Wait: devices try again.", "Add a node if it lasts."}},
	{"rate_limited", AboutAny, "It exceeds a limit.", []string{"docs/limits.md lists the limits", nextLog}},
	{"wrong_endpoint", AboutOffline, "Its OTA check was answered with an address that it cannot reach.", []string{nextDoctor, "Set --public-host."}},
	{"connect_not_seen", AboutOffline, "It received its configuration, and no connection from it arrived.", []string{nextReach, nextDoctor}},
	{"restarting", AboutAny, "It restarts because of a call, an upgrade, or its OTA check a moment ago.", []string{"Wait a minute, then ask again."}},
	{"upgrade_failed", AboutAny, "Its firmware upgrade failed; its button and wake word do not work until it restarts.", []string{"fleetd restart DEVICE; a device that is not connected has to be switched off and on", nextLog}},
	{"crashed", AboutOffline, "It went away while it worked on a request, and started again.", []string{nextLog, "Repeat the call once: if the device goes away again, its firmware crashes in this tool.", "Try another power supply and cable."}},
	{causeAsleep, AboutOffline, "It uses WebSocket and connects when somebody wakes it: normal.", []string{"Wake it. If it is not online 10 seconds later, it cannot reach the address in the evidence."}},
	{"protocol", AboutAny, "It violates the protocol.", []string{nextLog, "Update its firmware."}},
	{"too_large", AboutOffline, "It sent a message over the limit.", []string{nextLog, "docs/limits.md lists the limits"}},
	{"slow", AboutOffline, "It reads too slowly: too much waited to be written.", []string{"Look at its Wi-Fi signal.", nextLog}},
	{"dead", AboutOffline, "It sent nothing any more: no power, or no Wi-Fi.", []string{nextPower}},
	{"gone", AboutOffline, "It closed the connection or the network did, and it has not returned.", []string{nextPower, nextReach}},
	{"idle", AboutOffline, "The connection was closed because nothing was sent (--websocket-idle close).", []string{"Wake it, or set --websocket-idle keep."}},
	{"node_lost", AboutOffline, "The node that held it was lost, and it has not reached another one.", []string{"fleetd nodes", "Can the device reach the other nodes, by the address in its OTA reply?"}},
	{"draining", AboutOffline, "The node that held it stopped, and it has not reached another one.", []string{"fleetd nodes", "Can the device reach the other nodes, by the address in its OTA reply?"}},
	{"flapping", AboutOnline, "It connects and disconnects again and again.", []string{nextLog, "Look at its Wi-Fi signal and power."}},
	{"mcp_silent", AboutOnline, "It is connected and does not answer MCP.", []string{nextLog, "Restart it.", "With an external broker: does the broker subscribe for it? See docs/howto/emqx.md."}},
	{"mcp_failed", AboutOnline, "Its tools cannot be listed.", []string{nextLog, "Update its firmware."}},
	{"tools_missing", AboutOnline, "Its list of tools is missing or incomplete.", []string{"fleetd tools DEVICE --user", "Update its firmware; missing tools can be called by name."}},
	{"udp_silent", AboutOnline, "A conversation is open and no audio arrives.", []string{"Is the UDP port open, as UDP? See docs/troubleshooting.md, devices connect but stay silent.", nextDoctor}},
	{"main_loop_busy", AboutOnline, "It is connected, and calls are answered late or not at all.", []string{"Give calls more time: --timeout 120s.", nextLog}},
	{"policy_denied", AboutCall, "A rule or the caller's key refused it.", []string{"fleetd policy explain KEY DEVICE TOOL"}},
	{"confirmation_missing", AboutCall, "A person has to confirm it.", []string{"Repeat the same call with the confirmation of the answer, within 60 s."}},
	{"confirmation_expired", AboutCall, "Its confirmation belongs to another call, was used, or has expired.", []string{"Repeat the call, and confirm it within 60 s."}},
	{"arguments_refused", AboutCall, "Its arguments do not fit the tool.", []string{"fleetd tools DEVICE shows the schema"}},
	{"tool_unknown", AboutCall, "The device does not have the tool.", []string{"fleetd tools DEVICE --user"}},
	{"device_offline", AboutCall, "The device was not connected.", []string{"fleetd explain DEVICE"}},
	{"queue_full", AboutCall, "Too many calls waited already.", []string{"Send fewer calls at once, or a job: docs/jobs.md."}},
	{"waited_behind", AboutCall, "It waited for another call on the device.", []string{"Give it more time, or send fewer calls to this device."}},
	{"not_sent", AboutCall, "It was not sent to the device.", []string{"Repeat it: the device has not acted."}},
	{"answered_late", AboutCall, "The device answered after the caller had left.", []string{"Do not repeat it: the device has acted.", "Give calls of this tool more time: --timeout."}},
	{"sent_no_answer", AboutCall, "It was sent, and the device did not answer.", []string{"The device may have acted: look before repeating it.", "fleetd explain DEVICE"}},
	{"connection_lost", AboutCall, "The connection ended during the call.", []string{"The device may have acted: look before repeating it.", "fleetd explain DEVICE"}},
	{"superseded", AboutCall, "The device connected again during the call.", []string{"The device may have acted: look before repeating it.", "fleetd explain DEVICE"}},
	{"camera_not_ready", AboutCall, "The camera did not take or upload a photo.", []string{"Repeat it once: the camera needs a moment after a start.", "fleetd doctor"}},
	{"answer_malformed", AboutCall, "The answer of the device could not be read.", []string{"Update its firmware.", "The device has acted: do not repeat it blindly."}},
	{"answer_too_large", AboutCall, "The answer of the device was over the limit.", []string{"docs/limits.md lists the limits"}},
	{"device_error", AboutCall, "The tool failed on the device.", []string{"The detail is the device's own words.", "fleetd explain DEVICE"}},
	{"hop_lost", AboutCall, "A part that the call needed did not answer: the node that holds the device, NATS or the database.", []string{"fleetd nodes", "Is /readyz of every node 200?"}},
	{"caller_left", AboutCall, "The caller cancelled the request.", []string{"The device may have acted if it was sent."}},
	{"unknown", AboutAny, "Nothing that is recorded explains it.", []string{nextLog, nextDoctor}},
}

var infos = func() map[Cause]*Info {
	m := map[Cause]*Info{}
	for i := range Causes {
		m[Causes[i].Cause] = &Causes[i]
	}
	return m
}()

// next returns what to do about a device with this cause.
func (c Cause) next(device string) []string {
	next := []string{}
	for _, text := range infos[c].Next {
		next = append(next, strings.ReplaceAll(text, "DEVICE", device))
	}
	return next
}
