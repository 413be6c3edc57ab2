package node

import (
	"cmp"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"strings"

	"fleetd/internal/config"
	"fleetd/internal/datadir"
)

// announce prints the start-up text, writes run.json, and logs warnings about the
// configuration.
func (n *node) announce() {
	info := n.runInfo()
	if err := datadir.WriteRunInfo(n.cfg.DataDir, info); err != nil {
		n.log.Warn("cannot write run.json; client commands on this machine will not find this node", "error", err)
	}
	n.onStop(func() { _ = datadir.RemoveRunInfo(n.cfg.DataDir) }) // after a kill, the free lock shows that it is outdated
	var b strings.Builder
	fmt.Fprintf(&b, "\n  fleetd %s, node %s\n\n", n.cfg.Version, n.cfg.Node)
	fmt.Fprintf(&b, "  Devices   type this OTA URL into the device's Wi-Fi page\n            %s\n", info.OTA)
	switch {
	case n.mqtt.front != nil:
		fmt.Fprintf(&b, "            MQTT %s, audio over UDP %s\n", n.mqtt.otaConfig.Endpoint, n.mqtt.udp)
	case n.mqtt.broker != nil:
		fmt.Fprintf(&b, "            MQTT broker %s, audio over UDP %s\n", n.mqtt.otaConfig.Endpoint, n.mqtt.udp)
	}
	if n.cfg.Console {
		fmt.Fprintf(&b, "  Console   %s/console/   fleetd console%s opens it\n", info.API, n.dataDirFlag())
	}
	fmt.Fprintf(&b, "  People    %s/docs   REST at /v1, token in %s\n", info.API, n.dir.File(datadir.FileToken))
	fmt.Fprintf(&b, "            fleetd devices%s\n", n.dataDirFlag())
	fmt.Fprintf(&b, "  Agents    %s/mcp   or the command fleetd mcp; fleetd keys create makes a key\n", info.API)
	services := "in this process only; --nats-listen opens a port"
	switch {
	case n.bus.embedded == nil:
		services = cmp.Or(n.bus.conn.ConnectedUrlRedacted(), "not connected yet")
	case n.bus.url != "":
		services = n.bus.url
	}
	fmt.Fprintf(&b, "  Services  NATS %s, subjects %s.devices.>\n\n", services, n.cfg.NATSPrefix)
	fmt.Fprint(os.Stderr, b.String())
	if warning := loopbackWarning(n.cfg, n.publicURL); warning != "" {
		n.log.Warn(warning)
	}
	if _, most := n.deviceLimiter.Open(); most > 0 && most < devicesWanted {
		n.log.Warn("the open-file limit limits the number of devices; raise it with ulimit -n or LimitNOFILE", "limit", openFiles(), "devices", most)
	}
}

// loopbackWarning returns a warning that devices on other machines cannot reach publicURL,
// with the setting to change; empty if they can.
func loopbackWarning(cfg *config.Config, publicURL string) string {
	u, err := url.Parse(publicURL)
	if err != nil { // the check of the OTA replies reports it
		return ""
	}
	ip, err := netip.ParseAddr(u.Hostname())
	if u.Hostname() != "localhost" && (err != nil || !ip.IsLoopback()) {
		return ""
	}
	const consequence = "devices are directed to a loopback address, so only the simulator on this machine can connect"
	switch {
	case cfg.PublicDeviceURL != "":
		return "--public-device-url is " + cfg.PublicDeviceURL + ": " + consequence
	case cfg.PublicHost != "":
		return "--public-host is " + cfg.PublicHost + ": " + consequence
	}
	return consequence + "; set --public-host"
}

// dataDirFlag returns the flag with which client commands find this node.
func (n *node) dataDirFlag() string {
	if n.cfg.Given("data-dir") {
		return " --data-dir " + n.cfg.DataDir
	}
	return ""
}
