package firmware

import (
	"errors"
	"strconv"
	"time"
)

// userTools is McpServer::AddUserOnlyTools (main/mcp_server.cc:128-298).
func userTools() []*tool {
	list := []*tool{
		{
			name: "self.get_system_info", description: "Get the system information",
			run: func(d *Device, _ []arg) (outcome, error) { return text(d.systemInfo().json()) },
		},
		{
			// The restart is queued before the reply, so the reply is never sent.
			name: "self.reboot", description: "Reboot the system",
			run: func(d *Device, _ []arg) (outcome, error) {
				d.post(job{kind: jobDo, do: func() {
					if d.sleep(time.Second) {
						d.restartSoon()
					}
				}})
				return flagText(true)
			},
		},
		{
			name:        "self.upgrade_firmware",
			description: "Upgrade firmware from a specific URL. This will download and install the firmware, then reboot the device.",
			// Meant as a description, the sentence became the default.
			properties: []property{str("url").orString("The URL of the firmware binary file to download and install")},
			run: func(d *Device, args []arg) (outcome, error) {
				d.post(job{kind: jobDo, do: func() { d.upgradeByTool(args[0].s) }})
				return flagText(true)
			},
		},
		{
			name: "self.screen.get_info", description: "Information about the screen, including width, height, etc.",
			run: func(d *Device, _ []arg) (outcome, error) {
				return text(`{"width":` + strconv.Itoa(d.profile.width) + `,"height":` + strconv.Itoa(d.profile.height) + `,"monochrome":false}`)
			},
		},
		{
			name: "self.screen.snapshot", description: "Snapshot the screen and upload it to a specific URL",
			properties: []property{str("url"), ranged("quality", 1, 100).or(80)},
			blocking:   true,
			run: func(d *Device, args []arg) (outcome, error) {
				return d.uploadSnapshot(args[0].s, int(args[1].n))
			},
		},
		{
			name: "self.screen.preview_image", description: "Preview an image on the screen",
			properties: []property{str("url")},
			blocking:   true,
			run: func(d *Device, args []arg) (outcome, error) {
				if err := d.preview(args[0].s); err != nil {
					var failure toolError
					switch {
					case errors.As(err, &failure):
						return outcome{}, failure
					case errors.Is(err, errOpen):
						return outcome{}, toolError("Failed to open URL: " + args[0].s)
					}
					return outcome{}, toolError("Failed to download image: " + args[0].s)
				}
				return flagText(true)
			},
		},
		{
			name: "self.assets.set_download_url", description: "Set the download url for the assets",
			properties: []property{str("url")},
			run: func(d *Device, args []arg) (outcome, error) {
				d.mu.Lock()
				err := d.settings.setText("assets", "download_url", args[0].s)
				d.mu.Unlock()
				if err != nil {
					// ESP_ERROR_CHECK aborts: the tool never returns.
					d.fail(errors.Join(errCrash, err))
					return outcome{}, err
				}
				return flagText(true)
			},
		},
	}
	for _, t := range list {
		t.userOnly = true
	}
	return list
}

// preview downloads a picture whole, as main/mcp_server.cc:230-270 does, and throws it away.
func (d *Device) preview(url string) error {
	call, err := d.get(d.fleet.ctx, url)
	if err != nil {
		return err
	}
	return errors.Join(call.pieces(func([]byte) error { return nil }), call.close())
}
