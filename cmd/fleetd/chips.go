package main

import (
	"cmp"
	"context"
	"encoding/csv"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

const (
	importBatch = 200 // chip keys of a request: the longest fit into its 64 KiB
	maxChipFile = 1_000_000
)

type chipsCmd struct {
	Import chipsImportCmd `cmd:"" help:"Import serial numbers and chip keys; devices that prove them are then admitted without approval."`
	List   chipsListCmd   `cmd:"" default:"withargs" help:"List the serial numbers and the devices that they prove; chip keys are never shown (the default)."`
	Remove chipsRemoveCmd `cmd:"" help:"Remove the chip key of a serial number. Its device stays a member."`
}

type chipsImportCmd struct {
	File string `arg:"" help:"CSV file with serial,key[,device] in each line; the key is eFuse KEY0, 64 hex digits. - reads standard input."`
	clientFlags
}

// Run checks the whole file before it sends the first line.
func (cmd *chipsImportCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	chips, err := readChips(a.stdin, cmd.File)
	if err != nil {
		return err
	}
	for done := 0; done < len(chips); done += importBatch {
		if err := c.Do(ctx, http.MethodPost, api.NewChips{Items: chips[done:min(done+importBatch, len(chips))]}, "attestation", "keys"); err != nil {
			return fmt.Errorf("%d of %d chip keys are imported; the file can be imported again as it is: %w", done, len(chips), err)
		}
	}
	fmt.Fprintf(a.stdout, "%d chip keys imported\n", len(chips))
	return nil
}

// readChips reads the file. Its errors name lines and never show their text, which may be a key.
func readChips(stdin io.Reader, name string) ([]api.NewChip, error) {
	in, err := input(stdin, name)
	if err != nil {
		return nil, failed("%w", err)
	}
	defer in.Close()
	lines := csv.NewReader(in)
	lines.Comment, lines.FieldsPerRecord, lines.TrimLeadingSpace, lines.ReuseRecord = '#', -1, true, true
	var chips []api.NewChip
	for {
		record, err := lines.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			if at, ok := errors.AsType[*csv.ParseError](err); ok {
				return nil, failed("line %d is not CSV: %w", at.Line, at.Err)
			}
			return nil, failed("read the chip keys: %w", err)
		}
		line, _ := lines.FieldPos(0)
		chip, err := readChip(record)
		switch {
		case err != nil && len(chips) == 0 && strings.EqualFold(strings.TrimSpace(record[0]), "serial"):
			continue // a heading
		case err != nil:
			return nil, failed("line %d: %w", line, err)
		case len(chips) >= maxChipFile:
			return nil, failed("more than %d chip keys; split the file", maxChipFile)
		}
		chips = append(chips, chip)
	}
	if len(chips) == 0 {
		return nil, failed("the file has no chip keys; each line is serial,key[,device]")
	}
	return chips, nil
}

func readChip(record []string) (api.NewChip, error) {
	if len(record) < 2 || len(record) > 3 {
		return api.NewChip{}, fmt.Errorf("it must be serial,key[,device], and has %s", count(len(record), "field"))
	}
	chip := api.NewChip{Serial: strings.TrimSpace(record[0]), Key: strings.TrimSpace(record[1])}
	if len(record) == 3 {
		chip.Device = strings.TrimSpace(record[2])
	}
	if key, err := hex.DecodeString(chip.Key); err != nil || len(key) != 32 {
		return api.NewChip{}, errors.New("the second field is not a chip key: 64 hex digits, the 32 bytes of eFuse block KEY0")
	}
	return chip, nil
}

type chipsListCmd struct {
	listFlags `set:"json=one JSON object per line"`
}

// Run prints the list.
func (cmd *chipsListCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	return printList(ctx, a, a.stdout, c, cmd.listFlags, []string{"SERIAL", "DEVICE", "IMPORTED"}, "no chip keys yet; `fleetd chips import` adds some", func(chip api.Chip) []string {
		return []string{chip.Serial, cmp.Or(chip.Device, "-"), timeCell(chip.ImportedAt)}
	}, nil, "attestation", "keys")
}

type chipsRemoveCmd struct {
	Serial string `arg:"" help:"Serial number."`
	yesFlag
	clientFlags
}

// Run removes one.
func (cmd *chipsRemoveCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	if err := cmd.ask(a, "Remove the chip key of "+cmd.Serial+"? Its device is then no longer admitted by its signature."); err != nil {
		return err
	}
	return a.change(cmd.Serial, "removed; a device that it proved stays a member", c.Do(ctx, http.MethodDelete, nil, "attestation", "keys", cmd.Serial))
}
