package node

import (
	"fmt"
	"os"
	"strings"

	"fleetd/internal/apiclient"
)

// announce prints the start-up block, notes where the node is, and warns of
// what would surprise later.
func (n *node) announce() {
	info := n.runInfo()
	if err := apiclient.WriteRunInfo(n.cfg.DataDir, info); err != nil {
		n.log.Warn("client commands on this machine will not find this node", "error", err)
	}
	n.onStop(func() { _ = apiclient.RemoveRunInfo(n.cfg.DataDir) }) // after a kill, the free lock tells
	var b strings.Builder
	fmt.Fprintf(&b, "\n  fleetd %s, node %s\n\n", n.cfg.Version, n.cfg.Node)
	fmt.Fprintf(&b, "  Devices   type this OTA URL into the device's Wi-Fi page\n            %s\n", info.OTA)
	switch {
	case n.mqtt.front != nil:
		fmt.Fprintf(&b, "            MQTT %s, audio over UDP %s\n", n.mqtt.told.Endpoint, n.mqtt.udp)
	case n.mqtt.broker != nil:
		fmt.Fprintf(&b, "            MQTT broker %s, audio over UDP %s\n", n.mqtt.told.Endpoint, n.mqtt.udp)
	}
	fmt.Fprintf(&b, "  People    %s/docs   REST at /v1, token in %s\n", info.API, n.dir.file(fileToken))
	fmt.Fprintf(&b, "            fleetd devices%s\n", n.dataDirFlag())
	fmt.Fprintf(&b, "  Agents    %s/mcp   or the command fleetd mcp; fleetd keys create makes a key\n", info.API)
	services := "in this process only; --nats-listen opens a port"
	switch {
	case n.bus.embedded == nil:
		services = n.bus.conn.ConnectedUrlRedacted()
		if services == "" {
			services = "not connected yet"
		}
	case n.bus.url != "":
		services = n.bus.url
	}
	fmt.Fprintf(&b, "  Services  NATS %s, subjects %s.devices.>\n\n", services, n.cfg.NATSPrefix)
	fmt.Fprint(os.Stderr, b.String())
	if strings.HasPrefix(n.publicURL, "http://127.") || strings.Contains(n.publicURL, "//localhost") {
		n.log.Warn("devices are told a loopback address; only the simulator on this machine can connect; give --public-host")
	}
	if _, most := n.gate.Open(); most > 0 && most < devicesWanted {
		n.log.Warn("the open-file limit bounds the devices of this node; raise it with ulimit -n or LimitNOFILE", "limit", openFiles(), "devices", most)
	}
}

// dataDirFlag is what client commands need to find this node.
func (n *node) dataDirFlag() string {
	if n.cfg.Given("data-dir") {
		return " --data-dir " + n.cfg.DataDir
	}
	return ""
}
